"""Ollama's API: bodies of its requests, their conversion into chats and completions, and answers in its format."""
