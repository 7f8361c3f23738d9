"""KV in files below simulated pools: the real store, writer and restorer on a disk of this process's memory."""
