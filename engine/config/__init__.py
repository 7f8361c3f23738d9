"""The engine's configuration of a model, read from config.json."""
