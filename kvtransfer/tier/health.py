"""Retries of a failing disk: the first after a pause of 1 s, later ones after doubled pauses of at most 60 s. Pure.

The pause doubles too if the disk fails again soon after a success.
"""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class DiskRetryState:
    """State that decides when to retry reading, or writing, after a failure. `now`: monotonic seconds."""

    def __init__(self) -> None:
        self.failures = 0
        """Number of failures since the start."""
        self._is_on = True
        self._pause_s = 0.0  # pause between the last failed try and the next try
        self._until = 0.0

    @property
    def is_on(self) -> bool:
        """Return whether the last read or write succeeded."""
        return self._is_on

    def allows(self, now: float) -> bool:
        """Return whether to try now: the last try succeeded, or a retry is due."""
        return self._is_on or now >= self._until

    def pause_left_s(self, now: float) -> float:
        """Return the seconds until the next try is allowed; 0 if a try is allowed now."""
        return 0.0 if self.allows(now) else self._until - now

    def failed(self, now: float) -> bool:
        """Record that a try failed; return whether the try before it had succeeded."""
        was_on, is_again = self._is_on, now < self._until + self._pause_s
        self.failures += 1
        self._is_on = False
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) if is_again or not was_on else FIRST_PAUSE_S
        self._until = now + self._pause_s
        return was_on

    def worked(self) -> bool:
        """Record that a try succeeded; return whether the try before it had failed."""
        was_off = not self._is_on
        self._is_on = True
        return was_off
