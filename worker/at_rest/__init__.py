"""Integrity checks of KV cached in the pool: checksums of randomly drawn blocks are compared with earlier ones."""
