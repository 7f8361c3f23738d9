"""From files into blocks of a pool, while they are verified: one thread reads, another checks and copies."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from baton.kvtransfer.tier.staging import PoolBlocks, Staging
from baton.kvtransfer.tier.store import TierStore

STAGING_BYTES = 8 << 20  # of each of the two stagings: large reads, small beside a pool


def staging_slots(block_bytes: int) -> int:
    return min(64, max(1, STAGING_BYTES // block_bytes))


class TierLoader:
    """`load` is called by one thread at a time."""

    def __init__(self, store: TierStore, pool: PoolBlocks, cores: frozenset[int] | None = None) -> None:
        """`cores`: where the second thread runs; None: anywhere."""
        block_bytes = store.format.block_bytes
        slots = staging_slots(block_bytes)
        self._store = store
        self._pool = pool
        self._stagings = tuple(Staging(slots, block_bytes, pinned=pool.on_gpu) for _ in range(2))
        self._landing = ThreadPoolExecutor(1, "kv-tier-land", lambda: run_on(cores))

    def load(self, names: Sequence[bytes], blocks: Sequence[int], go_on: Callable[[], bool] = lambda: True) -> int:
        """Blocks; returns how many of `blocks`, from the first on, have the KV of `names` now, verified.

        `go_on` is asked between reads. Raises: OSError, after which as many blocks as are lacking are none.
        """
        landed, landing = 0, None
        size = self._stagings[0].slots
        self._store.announce(names)
        try:
            for turn, begin in enumerate(range(0, len(names), size)):
                staging, wanted = self._stagings[turn % 2], names[begin : begin + size]
                read = self._store.load(wanted, staging)
                if landing is not None:
                    landed += landing.result()
                    landing = None
                if landed < begin:
                    break  # one of those before is not right: what comes behind it is of no use
                landing = self._land(wanted[:read], staging, blocks[begin : begin + read])
                if read < len(wanted) or not go_on():
                    break
        finally:
            if landing is not None:
                landed += landing.result()
        return landed

    def close(self) -> None:
        self._landing.shutdown()

    def _land(self, names: Sequence[bytes], staging: Staging, blocks: Sequence[int]) -> "Future[int]":
        def land() -> int:
            right = self._store.verify(names, staging)
            self._pool.copy_in(staging, blocks[:right])
            return right

        return self._landing.submit(land)


def run_on(cores: frozenset[int] | None) -> None:
    """This thread, on these cores. Raises: OSError where there are no such cores."""
    if cores is not None:
        os.sched_setaffinity(0, cores)
