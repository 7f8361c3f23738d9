"""Requests that wait for room, and the limits of their callers."""
