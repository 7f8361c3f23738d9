"""Placement policies on traces and simulated workers."""
