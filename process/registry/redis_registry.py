"""Client of Redis or Valkey, and the registry of workers there: announce, withdraw, list, take an epoch.

All keys share one hash tag, as scripts on a Redis cluster require:

    baton:{NAMESPACE}:workers      set of worker ids; readers prune it
    baton:{NAMESPACE}:worker:ID    record as JSON; expires TTL_MS after its last renewal
    baton:{NAMESPACE}:fence:ID     highest epoch of that id; outlives the record, so that zombies stay refused
    baton:{NAMESPACE}:epoch        highest epoch so far
    baton:{NAMESPACE}:written      written by each listing, which proves that Redis is writable
    baton:{NAMESPACE}:secrets      sorted set of ids of secrets, by the millisecond of the last announcement

With a cluster secret, all keys but the last have the secret's id after the namespace, and records are signed
(`ClusterSecret`); unsigned ones are ignored. A lost key is written again with the next renewal, so correctness does not
depend on Redis.
"""

import asyncio
import logging
from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from baton.process.registry.worker_record import WorkerRecord
from baton.process.security.cluster_secret import ClusterSecret
from baton.process.telemetry.logs import SeldomLog

if TYPE_CHECKING:
    from redis.asyncio import Redis

TTL_MS = 3000
NO_SECRET = "none"
_FENCE_TTL_MS = 3_600_000
_CALL_S = 1.0  # timeout of a call; redis-py's nested retries would take 3 s
_CONNECT_S, _CONNECT_TLS_S = 0.3, 0.8  # a TLS handshake takes several round trips

# Numbers in Lua are doubles. Epochs are below 2**53: milliseconds or small counters. Any other value counts as 0 and is
# overwritten, so that an invalid value does not block the key.
WHOLE = """
local function whole(text)
    local number = tonumber(text or '0')
    if number and number >= 0 and number < 9007199254740991 then return math.floor(number) end
    return 0
end
"""
_ANNOUNCE = (
    WHOLE
    + """
local fence = whole(redis.call('GET', KEYS[2]))
local epoch = tonumber(ARGV[2])
if epoch < fence then return 0 end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[5])
redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
redis.call('SADD', KEYS[3], ARGV[1])
if epoch > whole(redis.call('GET', KEYS[4])) then redis.call('SET', KEYS[4], ARGV[2]) end
local time = redis.call('TIME')
redis.call('ZADD', KEYS[5], time[1] * 1000 + math.floor(time[2] / 1000), ARGV[6])
redis.call('PEXPIRE', KEYS[5], ARGV[5])
return 1
"""
)
_WITHDRAW = """
if redis.call('GET', KEYS[2]) ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[3], ARGV[1])
return 1
"""
_TAKE_EPOCH = (
    WHOLE
    + """
local last = whole(redis.call('GET', KEYS[1]))
local epoch = ARGV[1]
if last + 1 > tonumber(epoch) then epoch = string.format('%.0f', last + 1) end
redis.call('SET', KEYS[1], epoch)
return epoch
"""
)
# The write fails if Redis is full, read-only or a replica. The records there would soon expire, so the list fails too.
_LIST = """
redis.call('SET', KEYS[3], '1', 'PX', ARGV[2])
local records = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
    local record = redis.pcall('GET', ARGV[1] .. id)
    if type(record) == 'table' then record = '' end
    if record then
        table.insert(records, {id, record})
    else
        redis.call('SREM', KEYS[1], id)
    end
end
local time = redis.call('TIME')
return {records, redis.call('ZRANGEBYSCORE', KEYS[2], time[1] * 1000 - ARGV[2], '+inf')}
"""

logger = logging.getLogger(__name__)


class RegistryUnavailable(Exception):
    """Error: Redis did not respond in time. Callers continue with what they know, and retry."""


class Announced(Enum):
    ACCEPTED = auto()
    FENCED = auto()
    """Another process with the same worker id and a higher epoch exists or existed: this one is a zombie."""


class RedisClient:
    """Client of one namespace on one Redis, connected at first use. Every call returns or raises RegistryUnavailable
    within `call_s`.
    """

    def __init__(
        self,
        redis_url: str,
        namespace: str,
        call_s: float,
        decode_responses: bool = True,
        secret: ClusterSecret | None = None,
    ) -> None:
        self.redis = _connect(redis_url, decode_responses)
        self._namespace = namespace
        self._secret = secret
        self._call_s = call_s
        self._unsigned = SeldomLog(logger)

    async def close(self) -> None:
        await self.redis.aclose()

    def key(self, name: str) -> str:
        return self.shared_key(name if self._secret is None else f"{self._secret.mark}:{name}")

    def shared_key(self, name: str) -> str:
        """Return the key of data that clusters with different secrets in one namespace share."""
        return f"baton:{{{self._namespace}}}:{name}"

    def seal(self, key: str, value: bytes) -> bytes:
        return value if self._secret is None else self._secret.seal(key, value)

    def unseal(self, key: str, value: bytes) -> bytes | None:
        """Return the content of a record. If it is not signed with this cluster's secret, log it and return None."""
        found = value if self._secret is None else self._secret.unseal(key, value)
        if found is None:
            self._unsigned.warning("", "record %s in Redis ignored: not signed with this cluster's secret", ascii(key))
        return found

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
    """Registry of workers. Every call returns or raises RegistryUnavailable within a second."""

    def __init__(self, redis_url: str, namespace: str, secret: ClusterSecret | None = None) -> None:
        super().__init__(redis_url, namespace, _CALL_S, secret=secret)
        self._unreadable = SeldomLog(logger)
        self._known: dict[tuple[str, str], WorkerRecord] = {}  # records of the last listing, by worker id and content
        self._mark = NO_SECRET if secret is None else secret.mark
        self._marks = {self._mark}  # ids of the own secret and of other clusters' secrets that were logged

    async def take_epoch(self, proposed: int) -> int:
        """Return the new highest epoch: the maximum of `proposed` and the previous highest epoch plus 1."""
        return int(await self.script(_TAKE_EPOCH, [self.key("epoch")], [proposed]))

    async def announce(self, record: WorkerRecord, ttl_ms: int = TTL_MS) -> Announced:
        """Write or renew a record for `ttl_ms`. Harmless to repeat."""
        epoch = _required_epoch(record)
        keys = [*self._worker_keys(record), self.key("epoch"), self.shared_key("secrets")]
        sealed = self.seal(keys[0], record.to_json().encode())
        arguments: list[str | int | bytes] = [record.worker_id, epoch, sealed, ttl_ms, _FENCE_TTL_MS, self._mark]
        accepted = await self.script(_ANNOUNCE, keys, arguments)
        return Announced.ACCEPTED if accepted else Announced.FENCED

    async def withdraw(self, record: WorkerRecord) -> None:
        """Remove a record, unless a later process has replaced it."""
        await self.script(_WITHDRAW, self._worker_keys(record), [record.worker_id, _required_epoch(record)])

    async def workers(self) -> tuple[WorkerRecord, ...]:
        """Return all live records. A record that this version cannot read is omitted, and its key is logged.

        Raises: RegistryUnavailable, also if Redis is not writable.
        """
        keys = [self.key("workers"), self.shared_key("secrets"), self.key("written")]
        listed, marks = await self.script(_LIST, keys, [self.key("worker:"), TTL_MS])
        self._tell_of_others(marks)
        known, self._known = self._known, {}
        for worker_id, sealed in listed:
            record = known.get((worker_id, sealed)) or self._read(worker_id, sealed)
            if record is not None:
                self._known[worker_id, sealed] = record
        return tuple(self._known.values())

    def _read(self, worker_id: str, sealed: str) -> WorkerRecord | None:
        """Check and parse a record; None, with a log line, if it cannot be used."""
        key = self.key(f"worker:{worker_id}")
        text = self.unseal(key, sealed.encode())
        try:
            return None if text is None else WorkerRecord.from_json(text.decode())
        except ValueError as error:
            self._unreadable.warning(key, "worker record %s in Redis ignored: %s", ascii(key), error)
            return None

    def _tell_of_others(self, marks: Sequence[str]) -> None:
        """Log each other cluster in this namespace once, because it may be a mistake that its secret differs."""
        if new := set(marks) - self._marks:
            self._marks |= new
            logger.warning(
                "namespace %s also has workers with another secret or none, which belong to another cluster. If they "
                "should belong to this one, give all processes the same --secret-file (BATON_SECRET_FILE)",
                self._namespace,
            )

    def _worker_keys(self, record: WorkerRecord) -> list[str]:
        name = record.worker_id
        return [self.key(f"worker:{name}"), self.key(f"fence:{name}"), self.key("workers")]


def _required_epoch(record: WorkerRecord) -> int:
    if record.epoch is None:
        raise ValueError(f"{record.worker_id} has no epoch and cannot be announced")
    return record.epoch


def _connect(redis_url: str, decode_responses: bool) -> "Redis":
    """Create a client that connects at first use and fails fast; by default, redis-py blocks for 2.8 s to 50 s.

    redis is imported here, so that a process without registry runs without the package.
    """
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import ExponentialWithJitterBackoff

    return Redis.from_url(
        redis_url,
        decode_responses=decode_responses,
        encoding_errors="replace",  # bytes that are not UTF-8 must not fail the call
        socket_timeout=0.3,
        socket_connect_timeout=_CONNECT_TLS_S if redis_url.startswith("rediss://") else _CONNECT_S,
        retry=Retry(ExponentialWithJitterBackoff(base=0.02, cap=0.2), 2),
        health_check_interval=5,
    )
