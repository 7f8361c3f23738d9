"""Low-rank adapters (LoRA) per request: read from PEFT folders, applied together in one batch."""
