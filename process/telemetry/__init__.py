"""Logs, traces and the context of the current request."""
