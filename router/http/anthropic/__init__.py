"""Anthropic's Messages protocol: what its clients send, and what they read."""
