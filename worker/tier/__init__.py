"""KV tier below a worker's pool: host memory and files that store copies of the pool's published blocks."""
