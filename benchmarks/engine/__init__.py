"""One engine: steps, kernels on a CPU, caches, precision."""
