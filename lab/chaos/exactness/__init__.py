"""Checks that an answer is the same to the last bit, however it is computed."""
