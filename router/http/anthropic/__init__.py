"""Anthropic's Messages API: bodies of its requests, their conversion into chats, and answers in its format."""
