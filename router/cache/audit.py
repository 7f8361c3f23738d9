"""Accuracy of a router's view of a worker's cache. Pure state."""

from collections import deque

WINDOW_REQUESTS = 64
LEAST_REQUESTS = 16
MOST_DRIFT = 0.25
"""Beyond this share of wrong predictions the view is fetched anew. That costs little where the view was right: mere
contention, with pools far too small for their work, made one prompt in eleven wrong.
"""
RESYNC_PERIOD_S = 10.0


class CacheAudit:
    """Accuracy of one worker's view: predicted hits against hits found."""

    def __init__(self) -> None:
        self.checked_requests = 0
        self.equal_requests = 0
        self.missing_tokens = 0  # predicted and not found
        self.surplus_tokens = 0  # found and not predicted
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
        """Share of the newest requests that were predicted wrongly."""
        return sum(self._wrong) / len(self._wrong) if self._wrong else 0.0

    def wants_resync(self, now: float) -> bool:
        """Return whether the view itself must be wrong; true at most once per interval."""
        rested = self._resynced_s is None or now - self._resynced_s >= RESYNC_PERIOD_S
        if not rested or len(self._wrong) < LEAST_REQUESTS or self.drift <= MOST_DRIFT:
            return False
        self._resynced_s = now
        self._wrong.clear()
        return True
