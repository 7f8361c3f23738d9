"""List and remove workers' KV files (`baton cache`)."""
