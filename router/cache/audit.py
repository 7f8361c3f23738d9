"""Accuracy of the router's view of a worker's prefix cache. Pure state."""

from collections import deque

WINDOW_REQUESTS = 64
LEAST_REQUESTS = 16
MOST_DRIFT = 0.25
"""Fraction of wrong predictions above which a new snapshot is requested. In far too small pools, contention alone makes
1/11 of the predictions wrong. A needless snapshot costs little.
"""
RESYNC_PERIOD_S = 10.0


class CacheAudit:
    """Comparison of predicted and actual prefix-cache hits on one worker."""

    def __init__(self) -> None:
        self.checked_requests = 0
        self.equal_requests = 0
        self.missing_tokens = 0  # predicted hits that the worker did not have
        self.surplus_tokens = 0  # hits of the worker that were not predicted
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
        """Fraction of wrong predictions among the newest requests."""
        return sum(self._wrong) / len(self._wrong) if self._wrong else 0.0

    def wants_resync(self, now: float) -> bool:
        """Return whether too many predictions were wrong for a correct view; true at most once per RESYNC_PERIOD_S."""
        rested = self._resynced_s is None or now - self._resynced_s >= RESYNC_PERIOD_S
        if not rested or len(self._wrong) < LEAST_REQUESTS or self.drift <= MOST_DRIFT:
            return False
        self._resynced_s = now
        self._wrong.clear()
        return True
