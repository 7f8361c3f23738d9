"""Benchmarks: compared figures are measured in one run. README.md lists them."""
