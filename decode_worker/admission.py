"""Who gets pages next: first come, first served, all or nothing. Waiting is bounded by the caller's timeout."""

import asyncio

from decode_worker.loop import DecodeLoop
from engine.decode_scheduler import DecodeRequest, Reservation


class Admission:
    """The queue in front of the decode engine's pages."""

    def __init__(self, loop: DecodeLoop) -> None:
        self._loop = loop
        self._turn = asyncio.Lock()  # fair: waiters get it in the order of their arrival
        self._room = asyncio.Event()
        self.waiting = 0

    def room_may_have_grown(self) -> None:
        self._room.set()

    async def reserve(self, request: DecodeRequest) -> Reservation:
        """Waits until all earlier requests have their pages and this one's are free.

        A caller that is cancelled must abort the request on the engine: the pages may just have been taken.
        Raises: RequestRefused, RequestTooLong.
        """
        self.waiting += 1
        try:
            async with self._turn:
                while True:
                    self._room.clear()  # before asking, so that room made meanwhile is not missed
                    reservation = await asyncio.wrap_future(self._loop.reserve(request))
                    if reservation is not None:
                        return reservation
                    await self._room.wait()
        finally:
            self.waiting -= 1
