"""Clients that nobody here wrote, unmodified from PyPI, over HTTP: `.venv/bin/python -m benchmarks.clients NAME`."""
