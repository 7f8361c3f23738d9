"""The meaning of the columns of `baton status`, for its --help."""

MEANINGS = {
    "worker": "id of the worker",
    "state": "connected, draining, or lost: it has no session with this router",
    "restarts": "how often its process was found gone without a drain",
    "running": "sequences in the batch",
    "pending": "requests that wait in the worker",
    "pending tokens": "prompt tokens not computed yet",
    "blocks": "KV blocks in use / in the pool",
    "pinned": "of those in use, blocks that a decode worker has yet to read",
    "cached": "blocks in the prefix cache, evicted when others need them",
    "hit rate": "share of prompt tokens found in the prefix cache",
    "preempted": "sequences that gave their blocks back for a while",
    "pid": "of the worker's process",
    "endpoint": "host:port of the worker",
}


def legend() -> str:
    """A paragraph for each column."""
    return "\n\n".join(f"{name}: {meaning}." for name, meaning in MEANINGS.items())
