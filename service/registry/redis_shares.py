"""The shares of the routers of one cluster, as bytes on Redis or Valkey: each writes its own and reads the rest.

    baton:{NAMESPACE}:routers      set of router ids; readers prune it
    baton:{NAMESPACE}:router:ID    the newest share of that router, gone SHARE_TTL_MS after it was written
    baton:{NAMESPACE}:planner      the router that may change roles now, gone with the lease
Nothing here is needed for correctness.
"""

import asyncio
from typing import TYPE_CHECKING, Any

from baton.service.registry.redis_registry import RegistryUnavailable, connect

if TYPE_CHECKING:
    from redis.asyncio import Redis

SHARE_TTL_MS = 1000
_CALL_S = 0.5

_EXCHANGE = """
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('SADD', KEYS[2], ARGV[1])
local shares = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[2])) do
    if id ~= ARGV[1] then
        local share = redis.call('GET', ARGV[4] .. id)
        if share then table.insert(shares, share) else redis.call('SREM', KEYS[2], id) end
    end
end
return shares
"""
_LEASE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_LEAVE = """
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[1])
if redis.call('GET', KEYS[3]) == ARGV[1] then redis.call('DEL', KEYS[3]) end
return 1
"""


class RedisShares:
    """One router's place among the others. Every call ends within half a second, or raises RegistryUnavailable."""

    def __init__(self, redis_url: str, namespace: str, router_id: str) -> None:
        self._redis: Redis = connect(redis_url, decode_responses=False)
        self._id = router_id
        self._prefix = f"baton:{{{namespace}}}"

    async def exchange(self, share: bytes) -> tuple[bytes, ...]:
        """Writes ours for SHARE_TTL_MS and returns those of the others, as old as they may be."""
        keys = [self._key(f"router:{self._id}"), self._key("routers")]
        return tuple(await self._run(_EXCHANGE, keys, [self._id, share, SHARE_TTL_MS, self._key("router:")]))

    async def lease(self, ttl_ms: int) -> bool:
        """Whether this router is the one that may change roles for the next `ttl_ms`."""
        return bool(await self._run(_LEASE, [self._key("planner")], [self._id, ttl_ms]))

    async def close(self) -> None:
        """Leaves at once, where Redis answers; otherwise with the time to live."""
        try:
            keys = [self._key(f"router:{self._id}"), self._key("routers"), self._key("planner")]
            await self._run(_LEAVE, keys, [self._id])
        except RegistryUnavailable:
            pass
        finally:
            await self._redis.aclose()

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    async def _run(self, script: str, keys: list[str], arguments: list[str | int | bytes]) -> Any:
        from redis.exceptions import RedisError

        try:
            async with asyncio.timeout(_CALL_S):
                return await self._redis.eval(script, len(keys), *keys, *arguments)
        except (RedisError, OSError) as error:
            raise RegistryUnavailable(f"{type(error).__name__}: {error}") from error
