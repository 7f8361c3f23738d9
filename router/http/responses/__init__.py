"""OpenAI's Responses API: bodies of requests, answers in its format, and stored responses."""
