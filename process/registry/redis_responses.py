"""Stored responses on Redis or Valkey, as bytes, shared by several routers.

baton:{NAMESPACE}:response:OWNER:NAME      a record, which expires
baton:{NAMESPACE}:responses:OWNER          sorted set of `OWNER BYTES NAME`, by the microsecond of expiry
baton:{NAMESPACE}:responses:OWNER:bytes    sum of their bytes
baton:{NAMESPACE}:responses                sorted set of all owners' responses
baton:{NAMESPACE}:responses:bytes          sum of all owners' bytes
"""

from dataclasses import dataclass

from baton.process.registry.redis_registry import RedisClient
from baton.process.security.cluster_secret import ClusterSecret

_CALL_S = 0.5

_COMMON = """
local record, index, name, owner = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local own = index .. ':' .. owner
local function forget(entry, is_gone)
    local whose, size, which = string.match(entry, '^(%S+) (%d+) (.+)$')
    if not whose then
        redis.call('ZREM', index, entry)
        redis.call('ZREM', own, entry)
        return
    end
    if not is_gone then redis.call('DEL', record .. whose .. ':' .. which) end
    for _, place in ipairs({index, index .. ':' .. whose}) do
        if redis.call('ZREM', place, entry) == 1 then redis.call('DECRBY', place .. ':bytes', size) end
    end
end
"""
_PUT = (
    _COMMON
    + """
local value, ttl = ARGV[5], tonumber(ARGV[6])
local per_owner, bytes_per_owner, all_bytes = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2] -- in milliseconds, two that come at once would be in the order of their names
for _, old in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', now)) do forget(old, true) end
local key = record .. owner .. ':' .. name
local before = redis.call('STRLEN', key)
if before > 0 then forget(owner .. ' ' .. before .. ' ' .. name) end
local entry = owner .. ' ' .. string.len(value) .. ' ' .. name
redis.call('SET', key, value, 'PX', ttl)
for _, place in ipairs({index, own}) do
    if not tonumber(redis.call('GET', place .. ':bytes') or '0') then redis.call('DEL', place .. ':bytes') end
    redis.call('ZADD', place, now + ttl * 1000, entry)
    redis.call('INCRBY', place .. ':bytes', string.len(value))
end
local function total(place) return tonumber(redis.call('GET', place .. ':bytes') or '0') end
while redis.call('ZCARD', own) > 0 and (redis.call('ZCARD', own) > per_owner or total(own) > bytes_per_owner) do
    forget(redis.call('ZRANGE', own, 0, 0)[1])
end
while redis.call('ZCARD', index) > 0 and total(index) > all_bytes do
    forget(redis.call('ZRANGE', index, 0, 0)[1])
end
for _, place in ipairs({index, own}) do
    redis.call('PEXPIRE', place, ttl + 60000)
    redis.call('PEXPIRE', place .. ':bytes', ttl + 60000)
end
return 1
"""
)
_DELETE = (
    _COMMON
    + """
local size = redis.call('STRLEN', record .. owner .. ':' .. name)
if size == 0 then return 0 end
forget(owner .. ' ' .. size .. ' ' .. name)
return 1
"""
)


@dataclass(frozen=True, slots=True)
class ResponseBounds:
    """Limits of stored responses. `per_owner`: number of records per owner; 0: none is stored."""

    ttl_s: float
    per_owner: int
    bytes_per_owner: int
    all_bytes: int


class RedisResponses(RedisClient):
    """Store of responses. Every call returns or raises RegistryUnavailable within half a second."""

    def __init__(
        self, redis_url: str, namespace: str, bounds: ResponseBounds, secret: ClusterSecret | None = None
    ) -> None:
        super().__init__(redis_url, namespace, _CALL_S, decode_responses=False, secret=secret)
        self._bounds = bounds

    async def put(self, owner: str, name: str, record: bytes) -> None:
        bounds = self._bounds
        limits = [round(bounds.ttl_s * 1e3), bounds.per_owner, bounds.bytes_per_owner, bounds.all_bytes]
        key = self._key(owner, name)
        await self.script(_PUT, [key], [*self._place(owner, name), self.seal(key, record), *limits])

    async def get(self, owner: str, name: str) -> bytes | None:
        key = self._key(owner, name)
        value: bytes | None = await self.run(self.redis.get(key))
        return None if value is None else self.unseal(key, value)

    async def delete(self, owner: str, name: str) -> bool:
        return bool(await self.script(_DELETE, [self._key(owner, name)], self._place(owner, name)))

    def _key(self, owner: str, name: str) -> str:
        return self.key(f"response:{owner}:{name}")

    def _place(self, owner: str, name: str) -> list[str | int | bytes]:
        return [self.key("response:"), self.key("responses"), name, owner]
