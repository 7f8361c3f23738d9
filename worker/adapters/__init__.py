"""LoRA adapters that a worker loads at start or for routers, and replacement of the model's weights."""
