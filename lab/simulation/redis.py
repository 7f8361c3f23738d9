"""In-memory substitute of Redis: registry, routers' shares, journals, adapter list. Keys expire in virtual time."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from baton.lab.simulation.network.loop import SimulatedLoop
from baton.process.registry.redis_registry import TTL_MS, Announced, RegistryUnavailable
from baton.process.registry.redis_routers import SHARE_TTL_MS, JournalChange
from baton.process.registry.worker_record import WorkerRecord
from baton.router.config import RouterConfig

LONGEST_CALL_S = 0.5
URL = "redis://simulated"
_NEVER_S = float("inf")


class SimulatedRedis:
    """Simulated Redis: values by key; a key begins with its kind. Every call fails while `gone` is true."""

    def __init__(self, loop: SimulatedLoop, draw: random.Random) -> None:
        self._loop = loop
        self._draw = draw
        self._values: dict[str, tuple[Any, float]] = {}  # value and expiry time by key
        self.gone = False

    async def answer(self) -> None:
        """Wait for the duration of a call. Raises: RegistryUnavailable if Redis is `gone`."""
        await asyncio.sleep(LONGEST_CALL_S * self._draw.random() if self.gone else 0.002 * self._draw.random())
        if self.gone:
            raise RegistryUnavailable("simulated")

    def get(self, key: str) -> Any:
        """Return the value of a key; None if it is missing or has expired."""
        value, expires_s = self._values.get(key, (None, 0.0))
        return value if expires_s > self._loop.time() else None

    def put(self, key: str, value: object, ttl_s: float = _NEVER_S) -> None:
        self._values[key] = value, self._loop.time() + ttl_s

    def drop(self, key: str) -> None:
        self._values.pop(key, None)

    def of_kind(self, prefix: str) -> dict[str, Any]:
        found = {key: self.get(key) for key in self._values if key.startswith(prefix)}
        return {key: value for key, value in found.items() if value is not None}

    def flush(self) -> None:
        self._values.clear()

    def registry(self, redis_url: str | None, namespace: str, secret: object) -> "SimulatedRegistry | None":
        """Return the registry of this Redis; replaces `open_registry`."""
        return None if redis_url is None else SimulatedRegistry(self)

    def stores(self, config: RouterConfig, router_id: bytes) -> "SimulatedStores | None":
        """Return one router's stores; replaces `_open_stores`."""
        if config.redis_url is None:
            return None
        shares, journal = SimulatedShares(self, router_id.hex()), SimulatedJournal(self, router_id)
        return SimulatedStores(shares, journal, SimulatedAdapters(self))


class SimulatedRegistry:
    """Registry of workers, with the interface of RedisRegistry."""

    def __init__(self, redis: SimulatedRedis) -> None:
        self._redis = redis

    async def take_epoch(self, proposed: int) -> int:
        await self._redis.answer()
        epoch = max(proposed, (self._redis.get("epoch") or 0) + 1)
        self._redis.put("epoch", epoch)
        return epoch

    async def announce(self, record: WorkerRecord) -> Announced:
        await self._redis.answer()
        fence, name, epoch = f"fence:{record.worker_id}", f"worker:{record.worker_id}", record.epoch or 0
        if epoch < (self._redis.get(fence) or 0):
            return Announced.FENCED
        self._redis.put(fence, epoch)
        self._redis.put(name, record.to_json(), TTL_MS / 1e3)
        self._redis.put("epoch", max(epoch, self._redis.get("epoch") or 0))
        return Announced.ACCEPTED

    async def withdraw(self, record: WorkerRecord) -> None:
        await self._redis.answer()
        if self._redis.get(f"fence:{record.worker_id}") == record.epoch:
            self._redis.drop(f"worker:{record.worker_id}")

    async def workers(self) -> tuple[WorkerRecord, ...]:
        await self._redis.answer()
        return tuple(WorkerRecord.from_json(text) for text in self._redis.of_kind("worker:").values())

    async def close(self) -> None:
        """Do nothing."""


class SimulatedShares:
    """Exchange of one router's load record for the records of other routers, with the interface of RedisShares."""

    def __init__(self, redis: SimulatedRedis, router_id: str) -> None:
        self._redis = redis
        self._key = f"router:{router_id}"

    async def exchange(self, share: bytes) -> tuple[bytes, ...]:
        await self._redis.answer()
        self._redis.put(self._key, share, SHARE_TTL_MS / 1e3)
        return tuple(each for key, each in self._redis.of_kind("router:").items() if key != self._key)

    async def close(self) -> None:
        if not self._redis.gone:
            self._redis.drop(self._key)


class SimulatedAdapters:
    """Adapter list with the interface of RedisAdapters."""

    def __init__(self, redis: SimulatedRedis) -> None:
        self._redis = redis

    async def read(self) -> tuple[int, bytes] | None:
        await self._redis.answer()
        found: tuple[int, bytes] | None = self._redis.get("adapters")
        return found

    async def discard(self) -> str:
        await self._redis.answer()
        self._redis.drop("adapters")
        return "adapters"

    async def write(self, version: int, value: bytes) -> bool:
        await self._redis.answer()
        stored: tuple[int, bytes] | None = self._redis.get("adapters")
        if stored is not None and stored[0] >= version:
            return False
        self._redis.put("adapters", (version, value))
        return True

    async def close(self) -> None:
        """Do nothing."""


class _Value(NamedTuple):
    router_id: bytes
    record: bytes


class SimulatedJournal:
    """Journal of a router: a `JournalStore`."""

    def __init__(self, redis: SimulatedRedis, router_id: bytes) -> None:
        self._redis = redis
        self._router_id = router_id

    async def write(self, changes: Sequence[JournalChange]) -> tuple[str, ...]:
        """Write the changes; return the keys of records that another router owns."""
        await self._redis.answer()
        return tuple(change.key for change in changes if not self._change(change))

    async def read(self, key: str) -> bytes | None:
        await self._redis.answer()
        value: _Value | None = self._redis.get(f"journal:{key}")
        return None if value is None else value.record

    async def close(self) -> None:
        """Do nothing."""

    def _change(self, change: JournalChange) -> bool:
        """Write one change; return False if another router owns the record."""
        key, ttl_s = f"journal:{change.key}", change.ttl_ms / 1e3
        value: _Value | None = self._redis.get(key)
        if value is not None and value.router_id != self._router_id and not change.seize:
            return False
        if change.value is not None:
            self._redis.put(key, _Value(self._router_id, change.value), ttl_s)
        elif value is not None and value.router_id == self._router_id:
            self._redis.put(key, value, ttl_s)
        return True


class SimulatedStores(NamedTuple):
    """Stores of one router, in place of `_RedisStores`."""

    shares: SimulatedShares
    journal: SimulatedJournal
    adapters: SimulatedAdapters
