"""LoRA adapters of a worker, from its start or from routers, and replacements of the model's weights."""
