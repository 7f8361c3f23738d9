"""Membership and shared records on Redis or Valkey."""
