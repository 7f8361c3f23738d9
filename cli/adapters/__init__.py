"""`baton adapter`: LoRA adapters of a running service."""
