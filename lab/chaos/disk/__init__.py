"""KV in files under faults: a disk that fails, files that are damaged, and what workers say they found there."""
