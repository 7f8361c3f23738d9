"""Loader of stored blocks into a pool: the calling thread reads, two other threads verify and copy."""

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NamedTuple

from baton.kvtransfer.tier.levels import TierLevels
from baton.kvtransfer.tier.staging import BlockCopier, Staging
from baton.kvtransfer.tier.store import TierStore

STAGING_BYTES = 8 << 20  # bytes of one staging buffer: large enough for large reads, small compared with a pool
LANDINGS = 2  # number of concurrent verifications, each about as fast as a fast disk reads


def staging_slots(block_bytes: int) -> int:
    return min(64, max(1, STAGING_BYTES // block_bytes))


TierReader = TierStore | TierLevels


class TierLoader:
    """Loader of stored blocks into a pool. Only one thread at a time may call `load`."""

    def __init__(self, store: TierReader, pool: BlockCopier, cores: frozenset[int] | None = None) -> None:
        """Start the threads. `cores`: CPU cores of the verifying threads; None: any."""
        block_bytes = store.format.block_bytes
        slots = staging_slots(block_bytes)
        self._store = store
        self._pool = pool
        self._stagings = tuple(Staging(slots, block_bytes, pinned=pool.on_gpu) for _ in range(1 + LANDINGS))
        self._landing = ThreadPoolExecutor(LANDINGS, "kv-tier-land", lambda: run_on(cores))

    def load(self, names: Sequence[bytes], blocks: Sequence[int], goes_on: Callable[[], bool] = lambda: True) -> int:
        """Load KV of `names` into `blocks`; return the number of leading `blocks` that now have verified KV.

        `goes_on`: called between reads; the load ends if it returns False. Raises: OSError. After an error, the content
        of all `blocks` is undefined.
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
                if read < len(wanted) or not landed.whole or not goes_on():
                    break
        finally:
            wait([landing.right for landing in landings])  # verifications write to `blocks` until they finish
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
    right: "Future[int]"  # number of leading blocks that passed the verification


@dataclass(slots=True)
class _Landed:
    """Count of loaded and verified blocks, up to the first damaged block."""

    blocks: int = 0
    whole: bool = True

    def take(self, landing: _Landing) -> None:
        right = landing.right.result()
        if self.whole:
            self.blocks += right
            self.whole = right == landing.blocks


def run_on(cores: frozenset[int] | None) -> None:
    """Pin this thread to `cores`; None: do nothing. Raises: OSError if the machine lacks such cores."""
    if cores is not None:
        os.sched_setaffinity(0, cores)
