"""The routers' journal without Redis: the same rules, in the memory that all routers of a world share."""

from collections.abc import Sequence
from typing import NamedTuple

from router.journal import Change
from simulation.redis import SimulatedRedis


class _Value(NamedTuple):
    router_id: bytes
    record: bytes


class SimulatedJournal:
    """One router's hand in it: a `JournalStore`."""

    def __init__(self, redis: SimulatedRedis, router_id: bytes) -> None:
        self._redis = redis
        self._router_id = router_id

    async def write(self, changes: Sequence[Change]) -> tuple[str, ...]:
        """The keys of records that are another router's."""
        await self._redis.answer()
        return tuple(change.key for change in changes if not self._change(change))

    async def read(self, key: str) -> bytes | None:
        await self._redis.answer()
        value: _Value | None = self._redis.get(f"journal:{key}")
        return None if value is None else value.record

    async def close(self) -> None:
        """Nothing is open."""

    def _change(self, change: Change) -> bool:
        """False: the record is another router's."""
        key, ttl_s = f"journal:{change.key}", change.ttl_ms / 1e3
        value: _Value | None = self._redis.get(key)
        if value is not None and value.router_id != self._router_id and not change.seize:
            return False
        if change.value is not None:
            self._redis.put(key, _Value(self._router_id, change.value), ttl_s)
        elif value is not None and value.router_id == self._router_id:
            self._redis.put(key, value, ttl_s)
        return True
