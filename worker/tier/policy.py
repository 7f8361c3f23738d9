"""Rate of loads from the KV tier, and the time for which a prompt waits for a load. Pure.

text/kv_loading.py decides whether blocks are loaded at all.
"""

from baton.text.kv_loading import LoadCosts

DECAY = 0.8  # factor by which each load reduces the weight of earlier loads
FORGOTTEN_S = 60.0  # age at which a rate counts as unknown, so that the next prompt tries a load
LEAST_WAIT_S = 1.0
LONGEST_WAIT_S = 20.0


class LoadRate:
    """Measured rate of loads, in which small loads count little. `now`: monotonic seconds."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0
        self._observed = -FORGOTTEN_S

    def observe(self, size_bytes: int, seconds: float, now: float) -> None:
        self._bytes = DECAY * self._bytes + size_bytes
        self._seconds = DECAY * self._seconds + seconds
        self._observed = now

    def bytes_per_s(self, now: float) -> float | None:
        """Return the measured rate of loads; None if it is unknown or older than FORGOTTEN_S."""
        return None if now - self._observed >= FORGOTTEN_S else self.last_bytes_per_s

    @property
    def last_bytes_per_s(self) -> float | None:
        """Return the last measured rate of loads, however old; None if never measured."""
        return self._bytes / self._seconds if self._seconds > 0.0 else None


def longest_wait_s(costs: LoadCosts, blocks: int) -> float:
    """Return the longest time that a prompt waits for a load of `blocks` blocks, after which it uses the loaded ones.

    The time is that of computing the blocks, but at least LEAST_WAIT_S and at most LONGEST_WAIT_S.
    """
    compute_s = costs.compute_s(blocks)
    return LONGEST_WAIT_S if compute_s is None else min(LONGEST_WAIT_S, max(LEAST_WAIT_S, compute_s))
