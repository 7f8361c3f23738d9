"""HTTP routes for vectors (as in OpenAI's API), and for scores and ranked documents (as in vLLM)."""
