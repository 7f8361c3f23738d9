"""What a request on a decode worker waits for before it has blocks: its turn, room, and an earlier attempt's copy."""

import asyncio
from collections.abc import Iterable

from baton.engine.request import Request, Reservation
from baton.engine.runner.loop import EngineLoop

LONGEST_COPY_S = 2.0
"""No request waits longer; blocks that are not in the cache by then are pulled again."""


class PartialPrefixes:
    """Prompts that were given up half received because their source was lost, and are to be tried again here.

    Their confirmed blocks go into the cache when the copy under way has ended. The next attempt at the same prompt
    waits for that: it is sent right behind the command that gave the first one up, and begins with the same tokens.
    """

    def __init__(self) -> None:
        # By the hash of the prompt's last block, which is chained over all tokens before: unrelated prompts share
        # their first blocks, and not this one.
        self._ending: dict[bytes, set[asyncio.Task[None]]] = {}

    def __len__(self) -> int:
        """Prompts that are waited for."""
        return sum(map(len, self._ending.values()))

    def add(self, last_block: bytes, task: "asyncio.Task[None]") -> None:
        """`last_block`: its hash; empty for a prompt that keeps out of the cache.

        The blocks of the prompt are given back when `task` has ended, by a callback that it has already.
        """
        if last_block:
            self._ending.setdefault(last_block, set()).add(task)
            task.add_done_callback(lambda ended: self._forget(last_block, ended))

    async def settled(self, block_hashes: Iterable[bytes]) -> None:
        """Waits for the prompts that the prompt of these blocks continues, if there are any."""
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
    """The queue in front of the decode engine's blocks.

    A caller that is cancelled must abort the request on the engine: it may just have been taken in.
    """

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._turn = asyncio.Lock()  # fair: waiters get it in the order of their arrival
        self._room = asyncio.Event()
        self.waiting = 0

    def room_may_have_grown(self) -> None:
        self._room.set()

    async def reserve(self, request: Request, cache_root: bytes | None) -> Reservation:
        """Waits until all earlier requests have their blocks and this one's are free.

        Raises: RequestRefused, RequestTooLong.
        """
        self.waiting += 1
        if self._turn.locked():
            self._loop.touch(request.block_hashes)  # those before it take blocks that no request waits for
        try:
            async with self._turn:
                while True:
                    self._room.clear()  # before asking, so that room made meanwhile is not missed
                    reservation = await asyncio.wrap_future(self._loop.reserve(request, cache_root))
                    if reservation is not None:
                        return reservation
                    await self._room.wait()
        finally:
            self.waiting -= 1

    async def add(self, request: Request, cache_root: bytes | None) -> None:
        """Waits its turn and queues a prompt to be computed here; from then on the engine keeps its place in the queue.

        Raises: RequestRefused, RequestTooLong.
        """
        self.waiting += 1
        try:
            async with self._turn:
                await asyncio.wrap_future(self._loop.add(request, cache_root))
        finally:
            self.waiting -= 1
