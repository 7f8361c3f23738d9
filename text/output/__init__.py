"""Parsers that split an answer into reasoning, text and calls of functions."""
