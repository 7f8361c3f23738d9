"""Benchmarks, fault injection, simulation, sizing, and the training of the demo model."""
