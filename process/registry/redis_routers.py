"""Data that the routers of a cluster share on Redis or Valkey, as bytes: each router's load record, the journal of
running requests, the adapter list.

    baton:{NAMESPACE}:routers        set of router ids; readers prune it
    baton:{NAMESPACE}:router:ID      newest load record of that router; expires after SHARE_TTL_MS
    baton:{NAMESPACE}:planner        router that may change workers' roles; expires with its lease
    baton:{NAMESPACE}:journal:KEY    running request: 16 bytes of the router that serves it, then its record;
                                     expires with the request's deadline
    baton:{NAMESPACE}:adapters       adapters added while the cluster runs: version, a space, the list

A router changes only its own journal records and those that it seizes. Correctness does not depend on Redis.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.process.registry.redis_registry import WHOLE, RedisClient, RegistryUnavailable
from baton.process.registry.worker_record import newest_version
from baton.process.security.cluster_secret import ClusterSecret

SHARE_TTL_MS = 1000
ROUTER_ID_BYTES = 16
_CALL_S = 0.5

_EXCHANGE = """
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('SADD', KEYS[2], ARGV[1])
local shares = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[2])) do
    if id ~= ARGV[1] then
        local share = redis.pcall('GET', ARGV[4] .. id)
        if type(share) == 'table' then share = nil end
        if share then table.insert(shares, {id, share}) else redis.call('SREM', KEYS[2], id) end
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


_WRITE_ADAPTERS = (
    WHOLE
    + """
local held = redis.call('GET', KEYS[1])
local version = whole(held and string.match(held, '^%d+'))
if version >= tonumber(ARGV[1]) and version <= tonumber(ARGV[3]) then return 0 end
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. ARGV[2])
return 1
"""
)


@dataclass(frozen=True, slots=True)
class JournalChange:
    """Change of one journal record. `value`: new content; None: keep the content and change only the time to live.
    `seize`: also change a record that another router owns.
    """

    key: str
    ttl_ms: int
    value: bytes | None
    seize: bool = False


class RedisShares(RedisClient):
    """Exchange of the routers' load records: load, placements and use of API keys. Every call returns or raises
    RegistryUnavailable within half a second.
    """

    def __init__(self, redis_url: str, namespace: str, router_id: str, secret: ClusterSecret | None = None) -> None:
        super().__init__(redis_url, namespace, _CALL_S, decode_responses=False, secret=secret)
        self._id = router_id

    async def exchange(self, share: bytes) -> tuple[bytes, ...]:
        """Write this router's load record, which expires after SHARE_TTL_MS; return those of the other routers."""
        keys = [self.key(f"router:{self._id}"), self.key("routers")]
        arguments: list[str | int | bytes] = [self._id, self.seal(keys[0], share), SHARE_TTL_MS, self.key("router:")]
        found = await self.script(_EXCHANGE, keys, arguments)
        others = (self.unseal(self.key(f"router:{each.decode(errors='replace')}"), sealed) for each, sealed in found)
        return tuple(other for other in others if other is not None)

    async def lease(self, ttl_ms: int) -> bool:
        """Return whether this router may change workers' roles for the next `ttl_ms`."""
        return bool(await self.script(_LEASE, [self.key("planner")], [self._id, ttl_ms]))

    async def close(self) -> None:
        """Remove this router's records; without Redis they expire."""
        try:
            keys = [self.key(f"router:{self._id}"), self.key("routers"), self.key("planner")]
            await self.script(_LEAVE, keys, [self._id])
        except RegistryUnavailable:
            pass
        finally:
            await super().close()


class RedisAdapters(RedisClient):
    """An `AdapterStore` on Redis. Every call returns or raises RegistryUnavailable within half a second."""

    def __init__(self, redis_url: str, namespace: str, secret: ClusterSecret | None = None) -> None:
        super().__init__(redis_url, namespace, _CALL_S, decode_responses=False, secret=secret)

    async def read(self) -> tuple[int, bytes] | None:
        """Return version and content of the stored adapter list; None without one. Raises: ValueError for a version
        that is not a number.
        """
        key = self.key("adapters")
        stored: bytes | None = await self.run(self.redis.get(key))
        if stored is None:
            return None
        version, _, value = stored.partition(b" ")
        return int(version), self.unseal(key, value) or b""

    async def discard(self) -> str:
        """Delete an unreadable adapter list, so that routers write the list again. Return the deleted key."""
        key = self.key("adapters")
        await self.run(self.redis.delete(key))
        return key

    async def write(self, version: int, value: bytes) -> bool:
        """Store an adapter list; return False if a list of this version or a newer one is stored."""
        key = self.key("adapters")
        return bool(await self.script(_WRITE_ADAPTERS, [key], [version, self.seal(key, value), newest_version()]))


class RedisJournal(RedisClient):
    """One router's journal of running requests. Every call returns or raises RegistryUnavailable within half a
    second.
    """

    def __init__(self, redis_url: str, namespace: str, router_id: bytes, secret: ClusterSecret | None = None) -> None:
        """Create a journal. `router_id`: id of this process, of ROUTER_ID_BYTES bytes."""
        super().__init__(redis_url, namespace, _CALL_S, decode_responses=False, secret=secret)
        self._router_id = router_id
        self._write = self.redis.register_script(_WRITE)  # calls send the script's digest, not its text

    async def write(self, changes: Sequence[JournalChange]) -> tuple[str, ...]:
        """Write all changes in one call; return the keys of unchanged records, which another router owns now."""
        keys = [self.key(f"journal:{change.key}") for change in changes]
        arguments: list[str | int | bytes] = [self._router_id]
        for key, change in zip(keys, changes, strict=True):
            value = b"" if change.value is None else self.seal(key, change.value)
            arguments += [change.ttl_ms, int(change.seize), value]
        seized = await self.run(self._write(keys, arguments))
        return tuple(changes[number - 1].key for number in seized)

    async def read(self, key: str) -> bytes | None:
        """Return a request's record, even if another router owns it; None if there is no record."""
        name = self.key(f"journal:{key}")
        value: bytes | None = await self.run(self.redis.get(name))
        return None if value is None else self.unseal(name, value[ROUTER_ID_BYTES:])
