"""The worker: one process, in the role of prefill or decode, which may change."""
