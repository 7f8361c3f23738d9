"""Handlers of the HTTP routes, with one file per API or group of routes."""
