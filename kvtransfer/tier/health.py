"""Whether a failing disk is tried again: after a second, then after twice as long each time, a minute at most. Pure."""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class Health:
    """Of one kind of work, reading or writing. `now`: monotonic seconds."""

    def __init__(self) -> None:
        self.failures = 0
        """In all."""
        self._pause_s = 0.0
        self._until = 0.0

    @property
    def is_on(self) -> bool:
        """Nothing has failed since it last worked."""
        return not self._pause_s

    def allows(self, now: float) -> bool:
        """Whether to work now: it is on, or the pause is over and one more try is due."""
        return self.is_on or now >= self._until

    def failed(self, now: float) -> bool:
        """A try failed. Returns whether it had been on until then."""
        was_on = self.is_on
        self.failures += 1
        self._pause_s = FIRST_PAUSE_S if was_on else min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._until = now + self._pause_s
        return was_on

    def worked(self) -> bool:
        """A try went well. Returns whether it had been off until then."""
        was_off = not self.is_on
        self._pause_s = 0.0
        return was_off
