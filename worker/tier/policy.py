"""Policy of loading files: how fast they are loaded, and how long a prompt may wait for them. Pure.

Whether they are loaded at all: text/kv_loading.py.
"""

from baton.text.kv_loading import LoadCosts

DECAY = 0.8  # weight of a load against the one after it
FORGOTTEN_S = 60.0  # a rate that is so old is not known any more: the next prompt tries
LEAST_WAIT_S = 1.0
LONGEST_WAIT_S = 20.0


class LoadRate:
    """Bytes per second that loads brought, small ones counting little. `now`: monotonic seconds."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0
        self._observed = -FORGOTTEN_S

    def observe(self, size_bytes: int, seconds: float, now: float) -> None:
        self._bytes = DECAY * self._bytes + size_bytes
        self._seconds = DECAY * self._seconds + seconds
        self._observed = now

    def bytes_per_s(self, now: float) -> float | None:
        """Return the rate; None if it is unknown or too old."""
        return None if now - self._observed >= FORGOTTEN_S else self.last_bytes_per_s

    @property
    def last_bytes_per_s(self) -> float | None:
        """However long ago."""
        return self._bytes / self._seconds if self._seconds > 0.0 else None


def longest_wait_s(costs: LoadCosts, blocks: int) -> float:
    """Return how long a prompt waits: until computing would be done. What was loaded until then is kept."""
    compute_s = costs.compute_s(blocks)
    return LONGEST_WAIT_S if compute_s is None else min(LONGEST_WAIT_S, max(LEAST_WAIT_S, compute_s))
