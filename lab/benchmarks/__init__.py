"""Benchmarks, listed in README.md. Figures that are compared are always measured in the same run."""
