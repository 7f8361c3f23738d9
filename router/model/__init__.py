"""Served model of a router: its tokenizer and chat template, and the validation of requests for it."""
