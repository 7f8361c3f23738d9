"""Admission of requests to a decode worker: order of arrival, free blocks, unfinished copies of earlier attempts."""

import asyncio
from collections.abc import Iterable

from baton.engine.request import Request, Reservation
from baton.engine.runner.loop import EngineLoop

LONGEST_COPY_S = 2.0
"""Longest wait for the copy of an earlier attempt. Blocks that are not cached by then are pulled again."""


class PartialPrefixes:
    """Prompts whose prefill worker was lost during the transfer, until their received blocks are cached.

    Confirmed blocks enter the cache when the transfer's current copy has finished. The next attempt at the same prompt
    arrives before that, right after the command that cancelled the first attempt, so it waits for these blocks.
    """

    def __init__(self) -> None:
        # Keyed by the hash of the prompt's last block, which covers all tokens: unrelated prompts may have equal first
        # blocks, but not an equal last block.
        self._ending: dict[bytes, set[asyncio.Task[None]]] = {}

    def __len__(self) -> int:
        """Return the number of registered prompts."""
        return sum(map(len, self._ending.values()))

    def add(self, last_block: bytes, task: "asyncio.Task[None]") -> None:
        """Register a prompt until `task` has finished. An earlier done callback of `task` must release the blocks.

        `last_block`: hash of the prompt's last block; empty for a prompt that is not cached.
        """
        if last_block:
            self._ending.setdefault(last_block, set()).add(task)
            task.add_done_callback(lambda ended: self._forget(last_block, ended))

    async def settled(self, block_hashes: Iterable[bytes]) -> None:
        """Wait for registered prompts that are a prefix of the prompt with these blocks."""
        if self._ending:
            earlier = [task for each in block_hashes for task in self._ending.get(each, ())]
            if earlier:
                await asyncio.wait(earlier, timeout=LONGEST_COPY_S)

    def _forget(self, last_block: bytes, ended: "asyncio.Task[None]") -> None:
        tasks = self._ending[last_block]
        tasks.remove(ended)
        if not tasks:
            del self._ending[last_block]


class Admission:
    """Queue of requests that wait for KV blocks of the decode engine, in order of arrival.

    A cancelled caller must abort the request on the engine, because the engine may have accepted it already.
    """

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._turn = asyncio.Lock()  # asyncio.Lock is fair: first come, first served
        self._room = asyncio.Event()
        self.waiting = 0

    def room_may_have_grown(self) -> None:
        self._room.set()

    async def reserve(self, request: Request, cache_root: bytes | None) -> Reservation:
        """Wait until all earlier requests have their blocks, then reserve blocks for this request.

        Raises: RequestRefused, RequestTooLong.
        """
        self.waiting += 1
        if self._turn.locked():
            self._loop.touch(request.block_hashes)  # so that earlier requests do not evict this request's cached blocks
        try:
            async with self._turn:
                while True:
                    self._room.clear()  # cleared before the engine is asked, so that no release of blocks is missed
                    reservation = await asyncio.wrap_future(self._loop.reserve(request, cache_root))
                    if reservation is not None:
                        return reservation
                    await self._room.wait()
        finally:
            self.waiting -= 1

    async def add(self, request: Request, cache_root: bytes | None) -> None:
        """Wait for this request's turn and queue its prompt on the engine, which keeps the order.

        Raises: RequestRefused, RequestTooLong.
        """
        self.waiting += 1
        try:
            async with self._turn:
                await asyncio.wrap_future(self._loop.add(request, cache_root))
        finally:
            self.waiting -= 1
