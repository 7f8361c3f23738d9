"""Deterministic simulation: the real router, workers and client on one event loop with virtual time and a seed.

Only sockets, threads, the forward pass and the other parts that `seams.py` lists are simulated; all else is production
code.
"""
