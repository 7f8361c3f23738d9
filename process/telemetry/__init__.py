"""Logs, traces and the context of a request."""
