"""OpenAI's route for vectors, and vLLM's for scores and ranks."""
