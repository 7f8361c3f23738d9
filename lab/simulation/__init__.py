"""Deterministic simulation: the real router, workers and client on one event loop with virtual time and a seed.

Everything above sockets, threads and the forward pass is production code; `seams.py` lists the simulated parts.
"""
