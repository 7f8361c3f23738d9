"""What HTTP clients send, as pydantic models: what is neither served nor listed as harmless is refused by name."""
