"""Processes, stacks and hosts that benchmarks, fault injection and end-to-end tests start."""
