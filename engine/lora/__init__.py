"""Low-rank adapters (LoRA) chosen per request: read from PEFT folders, applied together in one batch."""
