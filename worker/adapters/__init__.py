"""LoRA adapters of a worker: those that it was started with, and those that routers add and take away."""
