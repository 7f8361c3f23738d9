"""Loader from files into blocks of a pool: one thread reads, others verify and copy."""

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from baton.kvtransfer.tier.records import SegmentFormat
from baton.kvtransfer.tier.staging import PoolBlocks, Staging

STAGING_BYTES = 8 << 20  # of each staging: large reads, small beside a pool
LANDINGS = 2  # at once: checking alone is about as slow as a fast disk


def staging_slots(block_bytes: int) -> int:
    return min(64, max(1, STAGING_BYTES // block_bytes))


class TierReader(Protocol):
    """See `TierStore` and `TierLevels`."""

    @property
    def format(self) -> SegmentFormat: ...
    def known(self, names: Sequence[bytes]) -> int: ...
    def announce(self, names: Sequence[bytes]) -> None: ...
    def load(self, names: Sequence[bytes], staging: Staging) -> int: ...
    def try_reading(self) -> None: ...
    def verify(self, names: Sequence[bytes], staging: Staging) -> int: ...


class TierLoader:
    """Loader; `load` is called by one thread at a time."""

    def __init__(self, store: TierReader, pool: PoolBlocks, cores: frozenset[int] | None = None) -> None:
        """Start the threads. `cores`: where the others run; None: anywhere."""
        block_bytes = store.format.block_bytes
        slots = staging_slots(block_bytes)
        self._store = store
        self._pool = pool
        self._stagings = tuple(Staging(slots, block_bytes, pinned=pool.on_gpu) for _ in range(1 + LANDINGS))
        self._landing = ThreadPoolExecutor(LANDINGS, "kv-tier-land", lambda: run_on(cores))

    def load(self, names: Sequence[bytes], blocks: Sequence[int], go_on: Callable[[], bool] = lambda: True) -> int:
        """Blocks; returns how many of `blocks`, from the first on, have the KV of `names` now, verified.

        `go_on` is asked between reads. Raises: OSError, after which nothing is known of any of `blocks`.
        """
        landings: deque[_Landing] = deque()
        landed, size = _Landed(), self._stagings[0].slots
        self._store.announce(names)
        try:
            for turn, begin in enumerate(range(0, len(names), size)):
                staging, wanted = self._stagings[turn % len(self._stagings)], names[begin : begin + size]
                read = self._store.load(wanted, staging)
                if len(landings) == LANDINGS:
                    landed.take(landings.popleft())
                landings.append(self._land(wanted[:read], staging, blocks[begin : begin + read]))
                if read < len(wanted) or not landed.whole or not go_on():
                    break
        finally:
            wait([landing.right for landing in landings])  # until then they write to the blocks
        for landing in landings:
            landed.take(landing)
        return landed.blocks

    def close(self) -> None:
        self._landing.shutdown()

    def _land(self, names: Sequence[bytes], staging: Staging, blocks: Sequence[int]) -> "_Landing":
        def land() -> int:
            right = self._store.verify(names, staging)
            self._pool.copy_in(staging, blocks[:right])
            return right

        return _Landing(len(blocks), self._landing.submit(land))


class _Landing(NamedTuple):
    blocks: int
    right: "Future[int]"  # of those, from the first on


@dataclass(slots=True)
class _Landed:
    """Blocks from the first on, up to one that is not right."""

    blocks: int = 0
    whole: bool = True

    def take(self, landing: _Landing) -> None:
        right = landing.right.result()
        if self.whole:
            self.blocks += right
            self.whole = right == landing.blocks


def run_on(cores: frozenset[int] | None) -> None:
    """Pin this thread. Raises: OSError if there are no such cores."""
    if cores is not None:
        os.sched_setaffinity(0, cores)
