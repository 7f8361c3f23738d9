"""Decode worker: pulls the KV of prompts and generates answers with continuous batching."""
