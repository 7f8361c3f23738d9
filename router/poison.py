"""Requests that kill the worker that computes them: finds them, and does not admit them again.

A dead process does not report the cause of its death, and many requests lose their attempt with it. So a request is
suspected if it lost its worker twice in a row without progress in between (`router/replay.py`): a request that only
ran beside a deadly one is served by the next worker and forgiven. Two deaths can still hit the same innocents, those
that wait behind the deadly one each time. Therefore suspected requests run one after another, each alone until it
makes progress (`Suspects`). One whose worker dies a third time, in its turn, counts as deadly: it fails, and
requests equal to it are refused for `QUARANTINE_S` (`Quarantine`).

One case is not distinguished: an innocent in its turn whose worker is killed by something else at that moment, the
third time in a row. A router knows only its own requests; each of several learns by itself.
"""

import asyncio
import hashlib
from array import array
from collections import OrderedDict
from dataclasses import replace
from types import TracebackType
from typing import Self

from router.request import PreparedRequest

QUARANTINE_S = 600.0
MOST_KEPT = 1024


def fingerprint(request: PreparedRequest) -> bytes:
    """Of the computation: prompt, adapter, sampling. Not of the seed, which is drawn anew where none is given."""
    adapter = "" if request.adapter is None else request.adapter.digest
    digest = hashlib.sha256(repr((adapter, replace(request.sampling, seed=0))).encode())
    digest.update(array("Q", request.token_ids).tobytes())
    return digest.digest()


class Quarantine:
    """Fingerprints that are refused for a while; of more than `MOST_KEPT` the newest. Pure: readings of a clock."""

    def __init__(self) -> None:
        self._until_s: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, found: bytes, now: float) -> None:
        self._until_s.pop(found, None)
        self._until_s[found] = now + QUARANTINE_S
        if len(self._until_s) > MOST_KEPT:
            self._until_s.popitem(last=False)

    def holds(self, request: PreparedRequest, now: float) -> bool:
        """Costs nothing while nothing is in it, as is usual."""
        while self._until_s and next(iter(self._until_s.values())) <= now:
            self._until_s.popitem(last=False)
        return bool(self._until_s) and fingerprint(request) in self._until_s


class Suspects:
    """One at a time is attempted. `async with suspects.turn()` waits for it; leaving gives it up, as does `release`."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    def turn(self) -> "Turn":
        return Turn(self._lock)


class Turn:
    """Released exactly once: the first call releases it."""

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock = lock
        self._held = False

    async def __aenter__(self) -> Self:
        await self._lock.acquire()
        self._held = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        if self._held:
            self._held = False
            self._lock.release()
