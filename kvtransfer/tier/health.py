"""Retries of a failing disk: after 1 s, then after twice the previous pause, 60 s at most. Pure.

The pause also doubles for a disk that works and soon fails again.
"""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class DiskRetryState:
    """Retry state of one kind of work, reading or writing. `now`: monotonic seconds."""

    def __init__(self) -> None:
        self.failures = 0
        """Number of failures since the start."""
        self._is_on = True
        self._pause_s = 0.0  # last pause
        self._until = 0.0

    @property
    def is_on(self) -> bool:
        """Return whether the last try succeeded."""
        return self._is_on

    def allows(self, now: float) -> bool:
        """Return whether to try now: the last try succeeded, or a retry is due."""
        return self._is_on or now >= self._until

    def pause_left_s(self, now: float) -> float:
        """Return the time until a retry is due."""
        return 0.0 if self.allows(now) else self._until - now

    def failed(self, now: float) -> bool:
        """Record a failed try; return whether the one before had succeeded."""
        was_on, is_again = self._is_on, now < self._until + self._pause_s
        self.failures += 1
        self._is_on = False
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) if is_again or not was_on else FIRST_PAUSE_S
        self._until = now + self._pause_s
        return was_on

    def worked(self) -> bool:
        """Record a successful try; return whether the one before had failed."""
        was_off = not self._is_on
        self._is_on = True
        return was_off
