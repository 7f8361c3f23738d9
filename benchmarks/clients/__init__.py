"""Clients of other projects, unmodified, over HTTP: `.venv/bin/python -m baton.benchmarks.clients NAME`."""
