"""OpenAI's Responses API: bodies, answers, and stored responses."""
