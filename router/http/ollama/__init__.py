"""Ollama's API: what its clients send, and what they read."""
