"""Routes for vectors (OpenAI), scores and ranks (vLLM)."""
