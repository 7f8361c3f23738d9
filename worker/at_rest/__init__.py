"""KV that lies in the pool's cache: whether it is still what was published, at a share of the blocks that are used."""
