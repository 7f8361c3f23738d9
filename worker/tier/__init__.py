"""KV tier below a worker's pool: host memory and files, written after and read before the pool's blocks are used."""
