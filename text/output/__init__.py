"""What a model writes, taken apart while it comes: its thoughts, its text, and its calls of functions."""
