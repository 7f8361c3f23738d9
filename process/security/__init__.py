"""API keys, authorization and TLS."""
