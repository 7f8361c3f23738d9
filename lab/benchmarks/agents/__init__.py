"""Coding agents, unmodified, against a real router whose workers answer from a script."""
