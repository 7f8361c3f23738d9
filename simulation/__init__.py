"""Deterministic simulation: the real router, workers and client on one event loop with virtual time and a seed.

In the manner of FoundationDB and TigerBeetle. What is real: everything above sockets, threads and the forward pass.
What is not, is listed in `seams.py`.
"""
