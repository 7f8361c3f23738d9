"""The decode worker: pulls the KV of prompts and runs continuous batching."""
