"""Pairs of a prefill and a decode worker whose transfers fail one after another: set aside for a while. Pure.

Both may serve well with others. A pair that fails again at once when its time is over is set aside for twice as long;
only several transfers in a row that succeed make it as good as any.
"""

from dataclasses import dataclass

FAILURES = 3
SUCCESSES = 3
FIRST_S, LAST_S = 5.0, 80.0

Pair = tuple[str, str]
"""The endpoints of a prefill and of a decode worker."""


@dataclass(slots=True)
class _Trouble:
    failures: int = 0  # in a row
    successes: int = 0  # in a row
    aside_s: float = 0.0  # how long it was set aside, the last time
    until_s: float = 0.0


class PairHealth:
    """Only of those that had trouble."""

    def __init__(self) -> None:
        self._troubles: dict[Pair, _Trouble] = {}

    def failed(self, pair: Pair, now: float) -> None:
        trouble = self._troubles.setdefault(pair, _Trouble())
        trouble.successes = 0
        trouble.failures += 1
        if now >= trouble.until_s and (trouble.failures >= FAILURES or trouble.aside_s):
            trouble.aside_s = min(LAST_S, 2 * trouble.aside_s or FIRST_S)
            trouble.until_s = now + trouble.aside_s

    def succeeded(self, pair: Pair) -> None:
        trouble = self._troubles.get(pair)
        if trouble is None:
            return
        trouble.failures = 0
        trouble.successes += 1
        if trouble.successes >= SUCCESSES or not trouble.aside_s:
            del self._troubles[pair]

    def forget(self, endpoint: str) -> None:
        """A worker's process is gone, and with it its troubles."""
        for pair in [pair for pair in self._troubles if endpoint in pair]:
            del self._troubles[pair]

    def apart(self, now: float) -> frozenset[Pair]:
        """Those that are set aside."""
        if not self._troubles:
            return _NONE
        return frozenset(pair for pair, trouble in self._troubles.items() if now < trouble.until_s)


_NONE: frozenset[Pair] = frozenset()
