"""Formats of tool calls, one module each."""
