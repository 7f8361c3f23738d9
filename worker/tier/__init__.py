"""The tier of files below a worker's pool: written behind the engine, read ahead of prompts."""
