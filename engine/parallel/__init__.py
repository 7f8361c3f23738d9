"""Tensor parallelism inside one worker: the first rank decides, and others compute their share of every step."""
