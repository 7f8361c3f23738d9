"""LoRA adapters and weights of a running service."""
