"""HTTP clients' messages, as pydantic models: a field that is neither served nor harmless is refused by name."""
