"""Membership in a cluster: workers announce themselves in Redis, routers list them. Tolerates outages of Redis.

registry = open_registry(redis_url, namespace)                  # None without a redis_url
epoch = await take_epoch(registry)
registration = Registration(registry, record, epoch, on_fenced) # in a worker; start() ... close()
membership = Membership(registry)                               # in a router; start() ... close()
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from baton.process.registry.redis_registry import TTL_MS, Announced, RedisRegistry, RegistryUnavailable
from baton.process.registry.worker_record import WorkerRecord
from baton.process.security.cluster_secret import ClusterSecret

RENEW_S = 1.0
POLL_S = 0.5

logger = logging.getLogger(__name__)


class MembershipView:
    """Known workers. A worker is removed if successful listings do not contain it for `ttl_s`.

    A listed record with a lower epoch than the known one is ignored: it is from a zombie, or from a process whose clock
    went back.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._records: dict[str, WorkerRecord] = {}
        self._missing_since: dict[str, float] = {}

    @property
    def workers(self) -> tuple[WorkerRecord, ...]:
        """Return the workers in the order of their ids."""
        return tuple(self._records[worker_id] for worker_id in sorted(self._records))

    def observe(self, listed: Sequence[WorkerRecord], now: float) -> bool:
        """Process a successful listing; return whether `workers` changed."""
        before = self.workers
        for record in listed:
            known = self._records.get(record.worker_id)
            # A registry that lost its data may list an old epoch first: keep the known, higher epoch.
            if known is None or (record.epoch or 0) >= (known.epoch or 0):
                self._records[record.worker_id] = record
        present = {record.worker_id for record in listed if self._records.get(record.worker_id) == record}
        self._forget_missing(present, now)
        return self.workers != before

    def lost_contact(self) -> None:
        """Record that the registry did not respond, and restart the time until missing workers are removed."""
        self._missing_since.clear()

    def _forget_missing(self, present: set[str], now: float) -> None:
        for worker_id in list(self._records):
            if worker_id in present:
                self._missing_since.pop(worker_id, None)
            elif now - self._missing_since.setdefault(worker_id, now) > self._ttl_s:
                del self._records[worker_id], self._missing_since[worker_id]


def open_registry(redis_url: str | None, namespace: str, secret: ClusterSecret | None = None) -> RedisRegistry | None:
    """Open the registry, which connects at first use; None without `redis_url`."""
    return None if redis_url is None else RedisRegistry(redis_url, namespace, secret)


@dataclass(frozen=True)
class Epoch:
    """Number of one process of a worker, higher than those of earlier processes of the worker.

    `from_clock`: the number is the wall clock's time, and may be lower if the clock went back.
    """

    number: int
    from_clock: bool = False


async def take_epoch(registry: RedisRegistry | None) -> Epoch:
    """Return a fencing epoch, higher than earlier ones; without Redis, the wall clock in milliseconds.

    If the clock went back, its epoch is lower than earlier ones; then `Registration` replaces it.
    """
    proposed = time.time_ns() // 1_000_000  # noqa: TID251 -- only the order of epochs counts
    if registry is None:
        return Epoch(proposed, from_clock=True)
    try:
        return Epoch(await registry.take_epoch(proposed))
    except RegistryUnavailable as error:
        logger.warning("registry does not respond: %s; using the wall clock as epoch: %d", error, proposed)
        return Epoch(proposed, from_clock=True)


_NOT_YET = "not asked yet"


class _Polling(ABC):
    """Periodic exchange with the registry, until no more steps are needed or until closed. Owns the registry.

    `close` sets an event and waits for a running step, whose duration is bounded. It does not cancel the task, because
    redis-py 8.1 often loses a cancellation that arrives with a response, and the task would never end.
    """

    consequence: str
    """Consequence of a registry that does not respond, for the log."""

    def __init__(self, registry: RedisRegistry, period_s: float) -> None:
        self._registry = registry
        self._period_s = period_s
        self._ending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._reported_lost = False
        self.problem = _NOT_YET  # error of the last step; empty if it succeeded

    @property
    def connected(self) -> bool:
        return not self.problem

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        await self._end()
        await self._registry.close()

    async def _end(self) -> None:
        self._ending.set()
        if self._task is not None:
            await self._task
            self._task = None

    @abstractmethod
    async def _step(self) -> bool:
        """Take one step; return whether another step is needed. Raises: RegistryUnavailable; the next step retries."""

    def _lost_contact(self) -> None:  # noqa: B027 -- not every one takes note of it
        """Handle a registry that does not respond."""

    async def _run(self) -> None:
        while not self._ending.is_set() and await self._try():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._period_s):
                    await self._ending.wait()

    async def _try(self) -> bool:
        """Take a step; log only when the registry stops responding, and when it responds again."""
        try:
            goes_on = await self._step()
        except RegistryUnavailable as error:
            if not self._reported_lost:
                logger.warning("%s: %s", self.consequence, error)
            self.problem, self._reported_lost = str(error), True
            self._lost_contact()
            return True
        if self._reported_lost:
            logger.info("registry responds again")
        self.problem, self._reported_lost = "", False
        return goes_on


class Registration(_Polling):
    """Announcement of one worker, renewed until closed. While Redis is not reachable, each period has a new attempt.

    If another live process has this worker's name and a higher epoch, `on_fenced` is called once and renewal ends. A
    dead process keeps its name for `ttl_s`. If the name is free but the registry refuses an epoch from the clock,
    because the clock went back, an epoch from the registry replaces it.
    """

    consequence = "worker not announced in the registry; routers that do not know it send it nothing"

    def __init__(
        self,
        registry: RedisRegistry,
        record: WorkerRecord,
        epoch: Epoch,
        on_fenced: Callable[[], None],
        renew_s: float = RENEW_S,
        ttl_s: float = TTL_MS / 1000,
    ) -> None:
        super().__init__(registry, renew_s)
        self._on_fenced = on_fenced
        self._ttl_s = ttl_s
        self._announced: WorkerRecord | None = None
        self._other_since: float | None = None  # when another process was first seen with the name
        self.announced = asyncio.Event()  # set by the first announcement, never cleared
        self.announce_as(record, epoch)

    def announce_as(self, record: WorkerRecord, epoch: Epoch) -> None:
        """Announce the worker with this record and epoch at the next renewal."""
        self.record = replace(record, epoch=epoch.number)
        self._epoch = epoch

    async def close(self) -> None:
        """Stop renewing and withdraw the record; without Redis it expires."""
        await self._end()
        try:
            await self._registry.withdraw(self._announced or self.record)
        except RegistryUnavailable as error:
            logger.warning("%s not removed from the registry: %s; its record expires", self.record.worker_id, error)
        finally:
            await self._registry.close()

    async def _step(self) -> bool:
        record, epoch = self.record, self._epoch
        if await self._registry.announce(record) is Announced.ACCEPTED:
            self._announced, self._other_since = record, None
            self.announced.set()
            if record is self.record:  # `announce_as` did not replace the record
                self._epoch = Epoch(epoch.number)  # accepted by the registry, so higher than earlier epochs
            return True
        if record is not self.record or (epoch.from_clock and await self._outlasts(record, epoch)):
            return True
        others = (each for each in await self._registry.workers() if each.worker_id == record.worker_id)
        logger.error(
            "worker id %s is used by another process at %s; this one at %s exits. Give each worker of a cluster its "
            "own --worker-id, and each cluster on one Redis its own --namespace",
            *(record.worker_id, next((other.endpoint for other in others), "an unknown address"), record.endpoint),
        )
        self._on_fenced()
        return False

    async def _outlasts(self, record: WorkerRecord, epoch: Epoch) -> bool:
        """Replace an epoch from the clock by one from the registry, once no other process has the name.

        Return False if another process has had the name for over `ttl_s`, so that it must be alive.
        """
        now = time.monotonic()
        if any(each.worker_id == record.worker_id for each in await self._registry.workers()):
            self._other_since = now if self._other_since is None else self._other_since
            return now - self._other_since <= self._ttl_s
        number = await self._registry.take_epoch(epoch.number)
        logger.info("%s has epoch %d in the registry, and %d in its links", record.worker_id, number, epoch.number)
        if record is self.record:  # `announce_as` did not replace the record
            self.announce_as(record, Epoch(number))
        return True


class Membership(_Polling):
    """List of workers, polled from Redis. While Redis is not reachable or not writable, the last list stays."""

    consequence = "registry does not respond; keeping the known workers"

    def __init__(self, registry: RedisRegistry, poll_s: float = POLL_S, ttl_s: float = TTL_MS / 1000) -> None:
        super().__init__(registry, poll_s)
        self._view = MembershipView(ttl_s)
        self._changed = asyncio.Event()

    @property
    def current(self) -> tuple[WorkerRecord, ...]:
        return self._view.workers

    async def watch(self) -> AsyncIterator[tuple[WorkerRecord, ...]]:
        """Yield `current` immediately, then after each change. A slow reader gets only the newest list. Never ends."""
        while True:
            changed = self._changed
            yield self.current
            await changed.wait()

    async def _step(self) -> bool:
        listed = await self._registry.workers()
        if self._view.observe(listed, time.monotonic()):
            self._changed.set()
            self._changed = asyncio.Event()  # a new event for the next change; the old one stays set
        return True

    def _lost_contact(self) -> None:
        self._view.lost_contact()


class StaticMembership:
    """Fixed list of workers."""

    def __init__(self, workers: Sequence[WorkerRecord]) -> None:
        self.current = tuple(workers)
        self.connected, self.problem = True, ""

    async def start(self) -> None:
        """Do nothing: the list is complete."""

    async def close(self) -> None:
        """Do nothing."""

    async def watch(self) -> AsyncIterator[tuple[WorkerRecord, ...]]:
        yield self.current
        await asyncio.Event().wait()


MembershipSource = Membership | StaticMembership
"""Membership source of a router. While Redis does not respond, it is not `connected`, and `current` is the last known
list.
"""
