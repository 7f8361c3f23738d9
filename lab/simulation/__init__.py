"""Deterministic simulation: the real router, workers and client on one event loop with virtual time and a seed.

In the manner of FoundationDB and TigerBeetle. Everything above sockets, threads and the forward pass is real.
`seams.py` lists the simulated parts.
"""
