"""Fair slots for costly work, so that no caller's work waits behind all of another's."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.router.admission.fair_queue import Entry, FairQueue


class Turns:
    """Slots that callers share by the cost of their work, for use on one event loop.

    One caller never has all of several slots.
    """

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._most = max(1, slots - 1)  # maximum slots of one caller
        self._queue = FairQueue[asyncio.Future[None]]()
        self._held = Counter[str]()
        self._unnamed = itertools.count()

    def name(self, tenant: str) -> str:
        """Return a caller's name for the turns of one request; a request without a tenant is a caller of its own."""
        return tenant or f"request {next(self._unnamed)}"

    @asynccontextmanager
    async def turn(self, tenant: str, cost: int) -> AsyncIterator[None]:
        """Wait for a slot and hold it for the duration of the context. `cost`: in the same unit for all callers."""
        name = tenant or self.name(tenant)
        begun = asyncio.get_running_loop().create_future()
        entry = self._queue.add(begun, name, 0, cost)
        self._begin()
        try:
            await begun
            yield
        finally:
            if begun.cancelled():
                self._queue.withdraw(entry)
            else:
                self._free += 1
                self._held[name] -= 1
                if not self._held[name]:
                    del self._held[name]
                self._begin()

    def _begin(self) -> None:
        while self._free:
            entry = next(filter(self._may_begin, self._queue.order()), None)
            if entry is None:
                return
            self._queue.take(entry)
            self._free -= 1
            self._held[entry.tenant] += 1
            entry.item.set_result(None)

    def _may_begin(self, entry: Entry[asyncio.Future[None]]) -> bool:
        return not entry.item.done() and self._held[entry.tenant] < self._most
