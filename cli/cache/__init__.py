"""KV in files, seen from outside (`baton cache`)."""
