"""Faults of KV files: a failing disk, damaged files, and the counters in which workers report them."""
