"""Explain one request, or list the newest (`baton why`)."""
