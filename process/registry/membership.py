"""Membership: a worker keeps itself announced, a router keeps a view of the workers. Survives a lost Redis.

registry = open_registry(config)                          None without a redis_url
epoch = await take_epoch(registry)
registration = Registration(registry, record, epoch, on_fenced)  a worker; start() ... close()
membership = Membership(registry) | StaticMembership(...) a router; start() ... close()
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
    """A worker is gone once successful listings have lacked it for `ttl_s`; failed listings remove no worker.

    A listing with a lower epoch lacks it too: of a zombie, or of a process whose epoch is from a clock that went back.
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
        """Take in a successful listing; returns whether `workers` changed."""
        before = self.workers
        for record in listed:
            known = self._records.get(record.worker_id)
            # A registry that lost its data may receive an old epoch first: the higher one that we know stands.
            if known is None or (record.epoch or 0) >= (known.epoch or 0):
                self._records[record.worker_id] = record
        present = {record.worker_id for record in listed if self._records.get(record.worker_id) == record}
        self._forget_missing(present, now)
        return self.workers != before

    def lost_contact(self) -> None:
        """The registry did not answer: time without listings counts against no worker."""
        self._missing_since.clear()

    def _forget_missing(self, present: set[str], now: float) -> None:
        for worker_id in list(self._records):
            if worker_id in present:
                self._missing_since.pop(worker_id, None)
            elif now - self._missing_since.setdefault(worker_id, now) > self._ttl_s:
                del self._records[worker_id], self._missing_since[worker_id]


def open_registry(redis_url: str | None, namespace: str, secret: ClusterSecret | None = None) -> RedisRegistry | None:
    """Connects on first use; None where no registry is configured."""
    return None if redis_url is None else RedisRegistry(redis_url, namespace, secret)


@dataclass(frozen=True)
class Epoch:
    """Identifies one life of a worker and, where it is not `from_clock`, orders it after those before."""

    number: int
    from_clock: bool = False


async def take_epoch(registry: RedisRegistry | None) -> Epoch:
    """A fencing epoch for this process, higher than those before it. Where Redis is absent: the wall clock in ms.

    The clock serves as an identifier only; nothing is timed by it. One that went back gives a lower number than those
    before: a `Registration` takes another then.
    """
    proposed = time.time_ns() // 1_000_000
    if registry is None:
        return Epoch(proposed, from_clock=True)
    try:
        return Epoch(await registry.take_epoch(proposed))
    except RegistryUnavailable as error:
        logger.warning("the registry does not answer yet; epoch %d comes from the clock: %s", proposed, error)
        return Epoch(proposed, from_clock=True)


_NOT_YET = "it was not asked yet"


class _Polling(ABC):
    """A step with the registry, once a period until it says that it is over, or this is closed. Owns the registry.

    Ended by an event, not by cancellation: redis-py loses a cancellation that arrives as its answer does (more than
    half of them when tried on 8.1), and the task would run for ever. A step in progress is waited for; it is bounded.
    """

    consequence: str
    """Consequence of a registry that does not respond, for the log."""

    def __init__(self, registry: RedisRegistry, period_s: float) -> None:
        self._registry = registry
        self._period_s = period_s
        self._ending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._reported_lost = False
        self.problem = _NOT_YET  # of the last step; empty where it succeeded

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
        """Take one step and return whether more are needed. Raises: RegistryUnavailable, after which more are."""

    def _lost_contact(self) -> None:  # noqa: B027 -- not every one takes note of it
        """The registry did not answer."""

    async def _run(self) -> None:
        while not self._ending.is_set() and await self._try():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._period_s):
                    await self._ending.wait()

    async def _try(self) -> bool:
        """A step; logs only when the registry ceases to answer, and when it answers again."""
        try:
            goes_on = await self._step()
        except RegistryUnavailable as error:
            if not self._reported_lost:
                logger.warning("%s: %s", self.consequence, error)
            self.problem, self._reported_lost = str(error), True
            self._lost_contact()
            return True
        if self._reported_lost:
            logger.info("the registry answers again")
        self.problem, self._reported_lost = "", False
        return goes_on


class Registration(_Polling):
    """Keeps one worker announced until closed. Absent Redis is tried again each period, for ever.

    An epoch of a clock that went back looks like that of a process before. It is exchanged for one of the registry
    where no other process has this worker's name; one that died lets go of it within `ttl_s`.
    `on_fenced` is called once if another process has the name; renewal ends then.
    """

    consequence = "this worker cannot announce itself in the registry: routers that do not know it send it nothing"

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
        self._other_since: float | None = None  # another process was seen to have the name
        self.announced = asyncio.Event()  # once
        self.announce_as(record, epoch)

    def announce_as(self, record: WorkerRecord, epoch: Epoch) -> None:
        """Announce the worker with this record and epoch from the next renewal on."""
        self.record = replace(record, epoch=epoch.number)
        self._epoch = epoch

    async def close(self) -> None:
        """Stop renewing and withdraw the record; without Redis it ends with its TTL."""
        await self._end()
        try:
            await self._registry.withdraw(self._announced or self.record)
        except RegistryUnavailable as error:
            logger.warning("%s could not be removed from the registry: %s", self.record.worker_id, error)
        finally:
            await self._registry.close()

    async def _step(self) -> bool:
        record, epoch = self.record, self._epoch
        if await self._registry.announce(record) is Announced.ACCEPTED:
            self._announced, self._other_since = record, None
            self.announced.set()
            if record is self.record:  # not replaced meanwhile
                self._epoch = Epoch(epoch.number)  # it has its place in the order now
            return True
        if record is not self.record or (epoch.from_clock and await self._outlasts(record, epoch)):
            return True
        others = (each for each in await self._registry.workers() if each.worker_id == record.worker_id)
        logger.error(
            "another process has taken over as %s: it is at %s, this one at %s. Each worker of a cluster needs a "
            "--worker-id of its own, and each cluster on one Redis a --namespace of its own",
            *(record.worker_id, next((other.endpoint for other in others), "an unknown address"), record.endpoint),
        )
        self._on_fenced()
        return False

    async def _outlasts(self, record: WorkerRecord, epoch: Epoch) -> bool:
        """Takes an epoch of the registry where no other process has the name. False: one has it, and lives."""
        now = time.monotonic()
        if any(each.worker_id == record.worker_id for each in await self._registry.workers()):
            self._other_since = now if self._other_since is None else self._other_since
            return now - self._other_since <= self._ttl_s
        number = await self._registry.take_epoch(epoch.number)
        logger.info("%s is epoch %d in the registry, %d in its sessions", record.worker_id, number, epoch.number)
        if record is self.record:  # not replaced meanwhile
            self.announce_as(record, Epoch(number))
        return True


class Membership(_Polling):
    """Membership from Redis, polled. While Redis is unreachable or takes no writes the last view stays."""

    consequence = "the registry does not answer; the known workers stay"

    def __init__(self, registry: RedisRegistry, poll_s: float = POLL_S, ttl_s: float = TTL_MS / 1000) -> None:
        super().__init__(registry, poll_s)
        self._view = MembershipView(ttl_s)
        self._changed = asyncio.Event()

    @property
    def current(self) -> tuple[WorkerRecord, ...]:
        return self._view.workers

    async def watch(self) -> AsyncIterator[tuple[WorkerRecord, ...]]:
        """Yield `current` immediately, then after each change; slow readers see the newest only. Ends by
        cancellation.
        """
        while True:
            changed = self._changed
            yield self.current
            await changed.wait()

    async def _step(self) -> bool:
        listed = await self._registry.workers()
        if self._view.observe(listed, time.monotonic()):
            self._changed.set()
            self._changed = asyncio.Event()  # the old one stays set for tasks that wait on it
        return True

    def _lost_contact(self) -> None:
        self._view.lost_contact()


class StaticMembership:
    """A given list that never changes; nothing to lose contact with."""

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
"""Membership source of a router. While Redis does not respond, it is not `connected` and `current` is as last seen."""
