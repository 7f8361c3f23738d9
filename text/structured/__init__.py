"""Structured output: its kinds and limits, and the library that enforces it token by token.

llguidance is imported only if a request needs it.
"""
