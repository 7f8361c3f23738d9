"""Measurements and fault injection: benchmarks, chaos, simulation, and the training of the demo model."""
