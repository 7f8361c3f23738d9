"""Worker process that changes its role between prefill and decode."""
