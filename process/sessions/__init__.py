"""Numbered, acknowledged conversations over connections that break."""
