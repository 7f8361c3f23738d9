"""One request: its attempts, its tokens, its answer, and how it continues."""
