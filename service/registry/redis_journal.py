"""The routers' journal on Redis or Valkey: one key per stream that runs, gone with the stream's deadline.

    baton:{NAMESPACE}:journal:KEY    16 bytes of the router that serves the stream, then its record
A router changes only records of its own, and those that it seizes. Nothing here is needed for correctness.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from baton.service.registry.redis_registry import RegistryUnavailable, connect

if TYPE_CHECKING:
    from redis.asyncio import Redis

ROUTER_ID_BYTES = 16
_CALL_S = 0.5

_WRITE = """
local seized = {}
for i, key in ipairs(KEYS) do
    local ttl, seize, value = ARGV[3 * i - 1], ARGV[3 * i], ARGV[3 * i + 1]
    local owner = redis.call('GETRANGE', key, 0, 15)
    if owner ~= '' and owner ~= ARGV[1] and seize == '0' then
        table.insert(seized, i)
    elseif value ~= '' then
        redis.call('SET', key, ARGV[1] .. value, 'PX', ttl)
    elseif owner == ARGV[1] then
        redis.call('PEXPIRE', key, ttl)
    end
end
return seized
"""


class JournalChange(Protocol):
    """`value` None: only the time to live is to change. `seize`: also a record of another router is taken."""

    @property
    def key(self) -> str: ...
    @property
    def ttl_ms(self) -> int: ...
    @property
    def value(self) -> bytes | None: ...
    @property
    def seize(self) -> bool: ...


class RedisJournal:
    """One router's hand in the journal. Every call ends within half a second, or raises RegistryUnavailable."""

    def __init__(self, redis_url: str, namespace: str, router_id: bytes) -> None:
        """`router_id`: ROUTER_ID_BYTES, of this process."""
        self._redis: Redis = connect(redis_url, decode_responses=False)
        self._router_id = router_id
        self._prefix = f"baton:{{{namespace}}}:journal:"
        self._write = self._redis.register_script(_WRITE)  # sent by its digest; whole where Redis has forgotten it

    async def write(self, changes: Sequence[JournalChange]) -> tuple[str, ...]:
        """All of them at once; returns the keys of records that are another router's now, and were left alone."""
        keys = [self._prefix + change.key for change in changes]
        arguments: list[str | int | bytes] = [self._router_id]
        for change in changes:
            arguments += [change.ttl_ms, int(change.seize), change.value or b""]
        seized = await self._run(self._write(keys, arguments))
        return tuple(changes[number - 1].key for number in seized)

    async def read(self, key: str) -> bytes | None:
        """A record of any router; None where there is none."""
        value = await self._run(self._redis.get(self._prefix + key))
        return None if value is None else value[ROUTER_ID_BYTES:]

    async def close(self) -> None:
        await self._redis.aclose()

    async def _run(self, command: Any) -> Any:
        from redis.exceptions import RedisError

        try:
            async with asyncio.timeout(_CALL_S):
                return await command
        except (RedisError, OSError) as error:
            raise RegistryUnavailable(f"{type(error).__name__}: {error}") from error
