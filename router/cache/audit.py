"""Accuracy of the view of a worker's cache. Pure state."""

from collections import deque

WINDOW_REQUESTS = 64
LEAST_REQUESTS = 16
MOST_DRIFT = 0.25
"""Share of wrong predictions above which a new snapshot is requested. Contention in pools that are far too small makes
one prediction in eleven wrong; a needless snapshot costs little.
"""
RESYNC_PERIOD_S = 10.0


class CacheAudit:
    """Comparison of predicted and actual hits at one worker."""

    def __init__(self) -> None:
        self.checked_requests = 0
        self.equal_requests = 0
        self.missing_tokens = 0  # predicted but not found
        self.surplus_tokens = 0  # found but not predicted
        self._wrong: deque[bool] = deque(maxlen=WINDOW_REQUESTS)
        self._resynced_s: float | None = None

    def take(self, predicted_tokens: int, actual_tokens: int) -> None:
        self.checked_requests += 1
        self.equal_requests += predicted_tokens == actual_tokens
        self.missing_tokens += max(0, predicted_tokens - actual_tokens)
        self.surplus_tokens += max(0, actual_tokens - predicted_tokens)
        self._wrong.append(predicted_tokens != actual_tokens)

    @property
    def drift(self) -> float:
        """Share of wrong predictions among the newest requests."""
        return sum(self._wrong) / len(self._wrong) if self._wrong else 0.0

    def wants_resync(self, now: float) -> bool:
        """Return whether the view must be wrong; true at most once per RESYNC_PERIOD_S."""
        rested = self._resynced_s is None or now - self._resynced_s >= RESYNC_PERIOD_S
        if not rested or len(self._wrong) < LEAST_REQUESTS or self.drift <= MOST_DRIFT:
            return False
        self._resynced_s = now
        self._wrong.clear()
        return True
