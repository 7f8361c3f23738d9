"""Fair slots for costly work: a caller's work does not wait until all queued work of another caller is done."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.router.admission.fair_queue import Entry, FairQueue


class Turns:
    """Slots that callers share fairly by the cost of their work. For use on one event loop.

    If there are several slots, one caller never has all of them.
    """

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._most = max(1, slots - 1)  # maximum number of slots of one caller
        self._queue = FairQueue[asyncio.Future[None]]()
        self._held = Counter[str]()
        self._unnamed = itertools.count()

    def name(self, tenant: str) -> str:
        """Return the caller's name for all turns of one request. Without a tenant, each request is its own caller."""
        return tenant or f"request {next(self._unnamed)}"

    @asynccontextmanager
    async def turn(self, tenant: str, cost: int) -> AsyncIterator[None]:
        """Wait for a slot and hold it for the duration of the context. `cost`: cost of the work, in any common unit."""
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
