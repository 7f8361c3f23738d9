"""The decode role: pulls the KV of prompts and runs continuous batching."""
