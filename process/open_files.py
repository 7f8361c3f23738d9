"""Limit of open files (`ulimit -n`): raised at start, and divided between connections and the process's own work."""

import resource

OWN_FILES = 128
"""Descriptors kept for a process's own work: links with workers, Redis, gRPC clients, helpers, files."""


def raise_limit() -> None:
    """Raise the soft limit of open files to the hard limit. Child processes inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connections_within(wanted: int) -> int:
    """Return the number of connections, at most `wanted`, that fit into the limit of open files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if limit == resource.RLIM_INFINITY else max(0, min(wanted, limit - OWN_FILES))
