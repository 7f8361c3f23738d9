"""`baton cache`."""
