"""The routers' journal without Redis: the same rules, in memory that all routers of a world share."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from router.journal import Change
from service.registry import RegistryUnavailable
from simulation.loop import SimulatedLoop

LONGEST_CALL_S = 0.5


@dataclass(frozen=True, slots=True)
class _Value:
    router_id: bytes
    record: bytes
    expires_s: float


class SharedJournal:
    """What Redis would hold. While it is `gone` every call fails, after a while."""

    def __init__(self, loop: SimulatedLoop, draw: random.Random) -> None:
        self._loop = loop
        self._draw = draw
        self._values: dict[str, _Value] = {}
        self.gone = False

    def hand(self, router_id: bytes) -> "SimulatedJournal":
        return SimulatedJournal(self, router_id)

    def flush(self) -> None:
        self._values.clear()

    async def answer(self) -> None:
        """Raises: RegistryUnavailable."""
        await asyncio.sleep(LONGEST_CALL_S * self._draw.random() if self.gone else 0.002 * self._draw.random())
        if self.gone:
            raise RegistryUnavailable("simulated")

    def read(self, key: str) -> bytes | None:
        value = self._living(key)
        return None if value is None else value.record

    def change(self, router_id: bytes, change: Change) -> bool:
        """False: the record is another router's."""
        now, value = self._loop.time(), self._living(change.key)
        if value is not None and value.router_id != router_id and not change.seize:
            return False
        expires_s = now + change.ttl_ms / 1e3
        if change.value is not None:
            self._values[change.key] = _Value(router_id, change.value, expires_s)
        elif value is not None and value.router_id == router_id:
            self._values[change.key] = _Value(router_id, value.record, expires_s)
        return True

    def _living(self, key: str) -> _Value | None:
        value = self._values.get(key)
        return None if value is None or value.expires_s <= self._loop.time() else value


class SimulatedJournal:
    """One router's hand in it: a `JournalStore`."""

    def __init__(self, shared: SharedJournal, router_id: bytes) -> None:
        self._shared = shared
        self._router_id = router_id

    async def write(self, changes: Sequence[Change]) -> tuple[str, ...]:
        await self._shared.answer()
        return tuple(change.key for change in changes if not self._shared.change(self._router_id, change))

    async def read(self, key: str) -> bytes | None:
        await self._shared.answer()
        return self._shared.read(key)

    async def close(self) -> None:
        """Nothing is open."""
