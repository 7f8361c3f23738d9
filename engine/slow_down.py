"""How much longer steps take than they did at their best, which is when nothing else ran on their device. Pure."""

FADING = 1.001  # a best time is believed a little less with every step, since contexts grow
WEIGHT = 0.05  # of a step in the mean: about the last 20 count
FEWEST_STEPS = 16  # before anything is reported


class SlowDown:
    """Of decode steps, which are compared with steps of about as many rows."""

    def __init__(self) -> None:
        self._best_s: dict[int, float] = {}  # by bits of the number of rows
        self._mean = 1.0
        self._steps = 0

    def observe(self, rows: int, duration_s: float) -> None:
        """A step of so many rows took so long."""
        size = rows.bit_length()
        best_s = min(duration_s, self._best_s.get(size, duration_s) * FADING)
        self._best_s[size] = best_s
        self._mean += WEIGHT * (duration_s / max(best_s, 1e-9) - self._mean)
        self._steps += 1

    @property
    def ratio(self) -> float:
        """At least 1; 0 while too few steps were measured."""
        return max(1.0, self._mean) if self._steps >= FEWEST_STEPS else 0.0
