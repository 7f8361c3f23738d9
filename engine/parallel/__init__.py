"""Tensor parallelism in one worker: rank 0 schedules the steps, and every rank computes its part of each step."""
