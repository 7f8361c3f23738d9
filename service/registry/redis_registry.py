"""Our client of Redis or Valkey, and the registry's commands there: announce, withdraw, list, take an epoch.

Keys share one hash tag, so that the scripts stay legal on a cluster:
    baton:{NAMESPACE}:workers      set of worker ids; readers prune it
    baton:{NAMESPACE}:worker:ID    record as JSON, gone TTL_MS after its last renewal
    baton:{NAMESPACE}:fence:ID     highest epoch seen of that id; outlives the record, so that a zombie stays refused
    baton:{NAMESPACE}:epoch        highest epoch given out
Knows no schedule. Nothing here is needed for correctness: a lost key comes back with the next renewal.
"""

import asyncio
import logging
from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from baton.service.registry.worker_record import WorkerRecord

if TYPE_CHECKING:
    from redis.asyncio import Redis

TTL_MS = 3000
_FENCE_TTL_MS = 3_600_000
_CALL_S = 1.0  # a Redis that accepts and stays mute would hold the client's retries of retries for 3 s
_CONNECT_S, _CONNECT_TLS_S = 0.3, 0.8  # a handshake is several ways there and back

# Epochs are milliseconds or small counters: exact as Lua numbers (below 2**53).
_ANNOUNCE = """
local fence = tonumber(redis.call('GET', KEYS[2]) or '0')
local epoch = tonumber(ARGV[2])
if epoch < fence then return 0 end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[5])
redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
redis.call('SADD', KEYS[3], ARGV[1])
if epoch > tonumber(redis.call('GET', KEYS[4]) or '0') then redis.call('SET', KEYS[4], ARGV[2]) end
return 1
"""
_WITHDRAW = """
if redis.call('GET', KEYS[2]) ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[3], ARGV[1])
return 1
"""
_TAKE_EPOCH = """
local last = tonumber(redis.call('GET', KEYS[1]) or '0')
local epoch = ARGV[1]
if last + 1 > tonumber(epoch) then epoch = string.format('%.0f', last + 1) end
redis.call('SET', KEYS[1], epoch)
return epoch
"""
_LIST = """
local records = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
    local record = redis.call('GET', ARGV[1] .. id)
    if record then table.insert(records, record) else redis.call('SREM', KEYS[1], id) end
end
return records
"""

logger = logging.getLogger(__name__)


class RegistryUnavailable(Exception):
    """Redis did not answer in time. Expected: the caller continues with what it knows and tries again."""


class Announced(Enum):
    ACCEPTED = auto()
    FENCED = auto()
    """A process with the same worker id and a higher epoch exists or existed: this one is a zombie."""


class RedisClient:
    """One namespace on one Redis, connected on first use. Every call ends within `call_s`, or raises
    RegistryUnavailable.
    """

    def __init__(self, redis_url: str, namespace: str, call_s: float, decode_responses: bool = True) -> None:
        self.redis = _connect(redis_url, decode_responses)
        self._prefix = f"baton:{{{namespace}}}"
        self._call_s = call_s

    async def close(self) -> None:
        await self.redis.aclose()

    def key(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    async def script(self, script: str, keys: Sequence[str], arguments: Sequence[str | int | bytes]) -> Any:
        return await self.run(self.redis.eval(script, len(keys), *keys, *arguments))

    async def run(self, command: Any) -> Any:
        from redis.exceptions import RedisError

        try:
            async with asyncio.timeout(self._call_s):
                return await command
        except (RedisError, OSError) as error:
            raise RegistryUnavailable(f"{type(error).__name__}: {error}") from error


class RedisRegistry(RedisClient):
    """Every call ends within a second, with a result or RegistryUnavailable."""

    def __init__(self, redis_url: str, namespace: str) -> None:
        super().__init__(redis_url, namespace, _CALL_S)
        self._unreadable: set[str] = set()

    async def take_epoch(self, proposed: int) -> int:
        """The higher of `proposed` and one more than any epoch given out so far."""
        return int(await self.script(_TAKE_EPOCH, [self.key("epoch")], [proposed]))

    async def announce(self, record: WorkerRecord) -> Announced:
        """Write or renew a record for TTL_MS. Harmless to repeat."""
        epoch = _required_epoch(record)
        keys = [*self._worker_keys(record), self.key("epoch")]
        arguments: list[str | int] = [record.worker_id, epoch, record.to_json(), TTL_MS, _FENCE_TTL_MS]
        accepted = await self.script(_ANNOUNCE, keys, arguments)
        return Announced.ACCEPTED if accepted else Announced.FENCED

    async def withdraw(self, record: WorkerRecord) -> None:
        """Remove a record, unless a later process has taken its place."""
        await self.script(_WITHDRAW, self._worker_keys(record), [record.worker_id, _required_epoch(record)])

    async def workers(self) -> tuple[WorkerRecord, ...]:
        """All live records. One that cannot be read (another version's) is left out and logged once."""
        texts = await self.script(_LIST, [self.key("workers")], [self.key("worker:")])
        records = []
        for text in texts:
            try:
                records.append(WorkerRecord.from_json(text))
            except ValueError as error:
                if text not in self._unreadable:
                    logger.warning("ignoring an unreadable worker record: %s", error)
                    self._unreadable.add(text)
        return tuple(records)

    def _worker_keys(self, record: WorkerRecord) -> list[str]:
        name = record.worker_id
        return [self.key(f"worker:{name}"), self.key(f"fence:{name}"), self.key("workers")]


def _required_epoch(record: WorkerRecord) -> int:
    if record.epoch is None:
        raise ValueError(f"{record.worker_id} has no epoch and cannot be announced")
    return record.epoch


def _connect(redis_url: str, decode_responses: bool) -> "Redis":
    """A lazy client that fails fast; redis-py's defaults block for 2.8 s to 50 s without a server.

    redis is imported here, so that a process without a registry runs without the package.
    """
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import ExponentialWithJitterBackoff

    return Redis.from_url(
        redis_url,
        decode_responses=decode_responses,
        socket_timeout=0.3,
        socket_connect_timeout=_CONNECT_TLS_S if redis_url.startswith("rediss://") else _CONNECT_S,
        retry=Retry(ExponentialWithJitterBackoff(base=0.02, cap=0.2), 2),
        health_check_interval=5,
    )
