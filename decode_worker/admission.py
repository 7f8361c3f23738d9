"""Which request gets pages next: first come, first served, all or nothing. The caller's timeout bounds the wait."""

import asyncio

from decode_worker.loop import DecodeLoop
from engine.sequence import Request, Reservation


class Admission:
    """The queue in front of the decode engine's pages. A caller that is cancelled must abort the request on the engine:
    it may just have been taken in.
    """

    def __init__(self, loop: DecodeLoop) -> None:
        self._loop = loop
        self._turn = asyncio.Lock()  # fair: waiters get it in the order of their arrival
        self._room = asyncio.Event()
        self.waiting = 0

    def room_may_have_grown(self) -> None:
        self._room.set()

    async def reserve(self, request: Request, cache_root: bytes | None) -> Reservation:
        """Waits until all earlier requests have their pages and this one's are free.

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
        """Waits its turn and queues a prompt to be computed here; from then on the engine keeps its place in line.

        Raises: RequestRefused, RequestTooLong.
        """
        self.waiting += 1
        try:
            async with self._turn:
                await asyncio.wrap_future(self._loop.add(request, cache_root))
        finally:
            self.waiting -= 1
