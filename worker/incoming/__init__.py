"""Checks of every message from other processes, before any of it is used."""
