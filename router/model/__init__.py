"""Served model: tokenizer, chat template, and validation of requests."""
