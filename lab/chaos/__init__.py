"""Fault injection into real processes under load, and a checker of every client's stream."""
