"""Worker: one process in the prefill or the decode role, which may change while it runs."""
