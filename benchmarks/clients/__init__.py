"""Clients that nobody here wrote, unmodified from PyPI, over HTTP: `python -m benchmarks.clients NAME`."""
