"""KV blocks: the pool, eviction order, memory layout and size."""
