"""Counts of values by bucket, as Prometheus has them. Pure."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

# fmt: off
TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
TOKEN_GAP_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
REQUEST_S = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)
# fmt: on
TOKENS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
SMALL_COUNTS = (1, 2, 5, 10, 20)
"""vLLM's buckets, and finer ones below them."""


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Iterable[float]) -> None:
        for value in values:
            self.observe(value)

    @property
    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it), and all of them at the end."""
        so_far, rows = 0, []
        for bound, count in zip((*map(_bound, self._bounds), "+Inf"), self._counts, strict=True):
            so_far += count
            rows.append((bound, float(so_far)))
        return rows


def _bound(value: float) -> str:
    return repr(float(value))
