"""Tensor parallelism in one worker: the first rank decides, and the others compute their share of every step."""
