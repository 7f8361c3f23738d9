"""Clients that nobody here wrote, unmodified from PyPI, against Baton over HTTP: `python -m benchmarks.clients NAME`."""
