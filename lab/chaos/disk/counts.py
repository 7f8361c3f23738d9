"""Counters of KV files from a router's /metrics, summed over all restarts of each worker."""

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

from baton.lab.chaos.watch import Background

PERIOD_S = 0.4
_LINE = re.compile(r"baton:kv_(?:tier_|(?=at_rest_))(\w+?)(?:_total)?\{([^}]*)\} ([\d.eE+]+)")
_WORKER = re.compile(r'engine="([^"]+)"')
_STATES = frozenset({"blocks", "bytes", "reads", "writes"})


def read_metrics(text: str) -> dict[str, dict[str, float]]:
    """Parse the counters of KV files and of cached KV at rest in a /metrics text, by worker and by name. Pure.

    The names lose their prefix: `baton:kv_tier_` or, for at-rest counters, `baton:kv_`.
    """
    found: dict[str, dict[str, float]] = {}
    for name, labels, value in _LINE.findall(text):
        worker = _WORKER.search(labels)
        if worker is not None and not name.endswith("_created"):
            found.setdefault(worker[1], {})[name] = float(value)
    return found


class TierCounts:
    """Sums of each worker's counters over its restarts, since a restarted worker counts from 0. Pure."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.latest: Mapping[str, Mapping[str, float]] = {}
        self.turned_off: Counter[str] = Counter()  # number of times that a worker turned `reads` or `writes` off
        self._last: dict[tuple[str, str], float] = {}
        self._off: set[tuple[str, str]] = set()

    def take(self, found: Mapping[str, Mapping[str, float]]) -> None:
        self.latest = found
        for worker, values in found.items():
            for name, value in values.items():
                if name not in _STATES:
                    before = self._last.get((worker, name), 0.0)
                    self.totals[name] += int(value - before if value >= before else value)
                    self._last[worker, name] = value
        off = {
            (worker, way) for worker, values in found.items() for way in ("reads", "writes") if not values.get(way, 1.0)
        }
        for _, way in off - self._off:
            self.turned_off[way] += 1
        self._off = off

    @property
    def off(self) -> dict[str, str]:
        """Return the operations that each worker has turned off: `reads`, `writes` or both."""
        found: dict[str, str] = {}
        for worker, way in sorted(self._off):
            found[worker] = f"{found[worker]}, {way}" if worker in found else way
        return found


class TierWatch(Background):
    """Collects counters from `start` to `stop`. `fetch`: returns the /metrics of a router, empty if none answers."""

    def __init__(self, fetch: Callable[[], Awaitable[str]]) -> None:
        super().__init__()
        self._fetch = fetch
        self.counts = TierCounts()

    async def _run(self) -> None:
        while True:
            found = read_metrics(await self._fetch())
            if found:
                self.counts.take(found)
            await asyncio.sleep(PERIOD_S)
