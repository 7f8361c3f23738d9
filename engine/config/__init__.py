"""The engine's configuration of a model, read from its config.json."""
