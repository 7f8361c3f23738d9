"""The engine in a script, without a server. The names and fields are those that vLLM's users know."""
