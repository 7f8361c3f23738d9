"""Integrity checks of cached KV in the pool, for a random share of the reused blocks."""
