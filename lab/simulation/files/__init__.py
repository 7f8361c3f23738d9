"""KV files of simulated workers: the real store, writer and restorer on an in-memory disk."""
