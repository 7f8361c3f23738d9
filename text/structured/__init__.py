"""Structured output: kinds and limits of forms, and the library that enforces them token by token.

llguidance is imported only if a request needs it.
"""
