"""Tensor parallelism inside one worker: a leader that decides, and followers that compute their share of every step."""
