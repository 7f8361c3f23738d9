"""The limit of open files (`ulimit -n`): raised at start, and shared by connections and the process's own work."""

import resource

OWN_FILES = 128
"""Descriptors kept for a process's own work: sessions with workers, Redis, gRPC's clients, helpers, files."""


def raise_limit() -> None:
    """Raise the soft limit to the hard one, which the system has set. Child processes inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connections_within(wanted: int) -> int:
    """Return how many of the wanted connections the limit leaves descriptors for."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if limit == resource.RLIM_INFINITY else max(0, min(wanted, limit - OWN_FILES))
