"""Retries of a failing disk: after a second, then after twice as long each time, a minute at most. Pure.

The pause of one that works and soon fails again is doubled too.
"""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class Health:
    """Retry state of one kind of work, reading or writing. `now`: monotonic seconds."""

    def __init__(self) -> None:
        self.failures = 0
        """Failures in total."""
        self._is_on = True
        self._pause_s = 0.0  # the last one
        self._until = 0.0

    @property
    def is_on(self) -> bool:
        """Return whether nothing has failed since it last worked."""
        return self._is_on

    def allows(self, now: float) -> bool:
        """Return whether to work now: it works, or the pause is over and a retry is due."""
        return self._is_on or now >= self._until

    def pause_left_s(self, now: float) -> float:
        """Return the time until a retry is due."""
        return 0.0 if self.allows(now) else self._until - now

    def failed(self, now: float) -> bool:
        """A try failed. Returns whether it had been on until then."""
        was_on, is_again = self._is_on, now < self._until + self._pause_s
        self.failures += 1
        self._is_on = False
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) if is_again or not was_on else FIRST_PAUSE_S
        self._until = now + self._pause_s
        return was_on

    def worked(self) -> bool:
        """A try went well. Returns whether it had been off until then."""
        was_off = not self._is_on
        self._is_on = True
        return was_off
