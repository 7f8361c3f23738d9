"""Links to all workers in the registry's membership, and inboxes of the requests that wait for workers' events.

Membership lists endpoints; a worker describes itself over its link. A worker that leaves membership is kept as long as
its link is open: the worker may be draining, or only the registry may have lost it. A worker's event goes to the inbox
of the event's request. Events of a closed attempt are dropped.
"""

import asyncio
import logging
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from baton.process.errors import Unavailable
from baton.process.registry.membership import MembershipSource
from baton.process.registry.worker_record import WorkerRecord, WorkerRole
from baton.process.security.cluster_secret import ClusterSecret
from baton.process.security.tls import InternalTls
from baton.protos import session_pb2
from baton.router.admission.queue import CreditRequest
from baton.router.cache.replica import CacheSnapshotPart, CacheUpdate
from baton.router.cache.tiers import TierChanges, TierSnapshotPart
from baton.router.fleet import wire as link_wire
from baton.router.fleet.adapters import AdapterStore, ClusterAdapters
from baton.router.fleet.link import FIRST_REPEAT_MS, LinkTiming, WorkerLink
from baton.router.fleet.wire import Command
from baton.router.placement.cluster import Cluster, LinkEnd
from baton.router.placement.decide import Placement
from baton.router.placement.hand_over import taker
from baton.router.placement.planner import endpoint_to_change
from baton.router.types.events import AttemptEvent, Failed, FailureReason
from baton.router.types.request import PreparedRequest
from baton.router.types.worker import WorkerDescription, WorkerReport

logger = logging.getLogger(__name__)

AT_ONCE = 8
GREETED_AT_ONCE = 32  # maximum number of links that open at the same time, so that each opens in time on slow hosts
RETRY_S = 1.0
TRANSFER_ID_BYTES = 16


class WaitingStream(Protocol):
    def resume(self) -> bool:
        """Continue; return False if the stream no longer waits."""


REPEATS_PER_S = 1_000  # maximum number of unchanged reports that all workers together send a router
MISSED_REPEATS = 2.5  # minimum limit of silence, in unchanged reports


def repeat_ms(workers: int) -> int:
    """Return the time after which workers repeat an unchanged report: reading these is most of what idle ones cost."""
    return FIRST_REPEAT_MS * max(1, math.ceil(1e3 * workers / REPEATS_PER_S / FIRST_REPEAT_MS))


class WakeUpLimiter:
    """Limiter of how many answer streams continue between two messages of a link. Streams wait in order of arrival.

    A link reads one message per event-loop iteration. If all streams wrote the tokens of one message before the next
    message is read, a router at full load would read too slowly, and messages would pile up in the workers. So at most
    `AT_ONCE` streams continue per iteration; tokens that arrive for a waiting stream go out together.
    """

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._left = at_once  # streams that may still continue in this iteration
        self._waiting: deque[WaitingStream] = deque()
        self._renews = False

    def admits(self, stream: WaitingStream) -> bool:
        """Take a slot of this event-loop iteration and return True. If none is left, resume the stream later."""
        if not self._renews:
            self._renews = True
            asyncio.get_running_loop().call_soon(self._renew)
        if self._left > 0:
            self._left -= 1
            return True
        self._waiting.append(stream)
        return False

    def _renew(self) -> None:
        """Begin a new iteration and resume as many waiting streams as the iteration has slots."""
        self._left = self._at_once
        while self._waiting and self._left > 0:
            self._left -= self._waiting.popleft().resume()
        self._renews = self._left < self._at_once
        if self._renews:
            asyncio.get_running_loop().call_soon(self._renew)


class WorkerArrival(NamedTuple):
    event: AttemptEvent
    at_s: float  # arrival, monotonic


Own = TypeVar("Own")


class Inbox(Generic[Own]):
    """Inbox of one request: worker events about its attempts, and own events, such as timeouts.

    `wake_ups`: limiter of all inboxes of the router. The length of the answer bounds the size of the inbox: workers
    never send a token twice over one link, so for a stalled client no more tokens are queued than it requested.
    """

    def __init__(self, wake_ups: WakeUpLimiter) -> None:
        self._wake_ups = wake_ups
        self.arrivals: deque[WorkerArrival] = deque()
        """Waiting worker events, oldest first."""
        self._own: deque[Own] = deque()
        self._reader: asyncio.Future[None] | None = None  # set while `take` waits for an event
        self._is_queued = False  # whether the limiter will call `resume`
        self._has_slot = False

    def put(self, event: AttemptEvent, now: float) -> None:
        self.arrivals.append(WorkerArrival(event, now))
        if self._reader is not None and self._is_admitted():
            self._wake()

    def put_own(self, event: Own) -> None:
        """Queue an own event of the request ahead of all worker events; its delivery needs no slot of the limiter."""
        self._own.append(event)
        self._wake()

    async def take(self) -> WorkerArrival | Own:
        """Wait for the next event, then remove and return it. Worker events need a slot of the limiter."""
        while not self._own:
            if self.arrivals and self._is_admitted():
                self._has_slot = False
                return self.arrivals.popleft()
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._own.popleft()

    def resume(self) -> bool:
        self._is_queued = False
        self._has_slot = self._reader is not None and not self._reader.done()
        self._wake()
        return self._has_slot

    def _is_admitted(self) -> bool:
        """Return whether the inbox has a slot of the limiter. If not, ask for one."""
        if not (self._has_slot or self._is_queued):
            self._has_slot = self._wake_ups.admits(self)
            self._is_queued = not self._has_slot
        return self._has_slot

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


@dataclass(frozen=True, slots=True)
class _Open:
    inbox: Inbox[Any]
    endpoints: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Connected:
    link: WorkerLink
    task: asyncio.Task[None]


class WorkerLinks:
    """Owner of the router's links to all workers: sends commands and delivers the workers' events."""

    def __init__(
        self,
        cluster: Cluster,
        timing: LinkTiming,
        router_id: bytes | None = None,
        tls: InternalTls | None = None,
        secret: ClusterSecret | None = None,
        adapter_store: AdapterStore | None = None,
        on_change: Callable[[], None] = lambda: None,
        on_capacity: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the owner, without links. `router_id`: 16 random bytes that identify this process; None: generated.

        `on_change` is called when a worker connected, changed or may be gone; `on_capacity` after each report, because
        capacity may have grown.
        """
        self._cluster = cluster
        self._timing = timing
        self._tls, self._secret = tls, secret
        self._router_id = router_id or secrets.token_bytes(16)
        self._links: dict[str, _Connected] = {}
        self._greetings = asyncio.Semaphore(GREETED_AT_ONCE)
        self._named: frozenset[str] = frozenset()  # endpoints that membership lists now
        self._attempts: dict[int, _Open] = {}
        self._handed: Counter[str] = Counter()  # blocks that each worker was commanded to fetch since its last report
        self.adapters = ClusterAdapters(cluster, self._send, adapter_store)
        self.wake_ups = WakeUpLimiter()
        """Limiter shared by the inboxes of all requests."""
        self.on_change, self.on_capacity = on_change, on_capacity

    async def follow(self, membership: MembershipSource) -> None:
        """Keep a link to every worker in membership until cancelled. An unexpected error of a link closes all links."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(), name="watch of links")
            async for records in membership.watch():
                self._follow(records, tasks)

    async def _watch(self) -> None:
        """Watch all links: with thousands of workers, a timer for each would take a tenth of a core."""
        watch_s = self._timing.watch_s
        while True:
            before = time.monotonic()
            await asyncio.sleep(watch_s)
            now = time.monotonic()
            paused_s = max(0.0, now - before - 2 * watch_s)
            asked_ms = repeat_ms(len(self._links))
            silence_s = max(self._timing.silence_s, MISSED_REPEATS * asked_ms / 1e3)
            for connected in self._links.values():
                connected.link.watch(now, paused_s, silence_s, asked_ms)

    def open(self, attempt_id: int, placement: Placement, inbox: Inbox[Any]) -> None:
        """Deliver worker events of this attempt to the inbox until `close`."""
        self._attempts[attempt_id] = _Open(inbox, placement.endpoints)

    def dispatch(self, tag: link_wire.Tag, request: PreparedRequest, placement: Placement) -> None:
        """Send the commands of an attempt to its workers. For a worker that is lost, the inbox gets a Failed event."""
        if request.pooling is not None and placement.computes_for_others:
            self._send_attempt(tag.attempt_id, placement.decode, link_wire.prefill(tag, request, placement))
            return
        start = link_wire.start(tag, request, placement.prefill)
        commands = [(placement.decode, start)]
        if placement.prefill is not None:
            commands.append((placement.prefill, link_wire.prefill(tag, request, placement)))
        for endpoint, command in commands:
            self._send_attempt(tag.attempt_id, endpoint, command)

    def adopt(self, tag: link_wire.Tag, router_id: bytes, attempt_id: int, endpoint: str) -> None:
        """Command a decode worker to continue another router's answer. If it is lost, the inbox gets a Failed event."""
        self._send_attempt(tag.attempt_id, endpoint, link_wire.adopt(router_id, attempt_id, tag))

    def _send_attempt(self, attempt_id: int, endpoint: str, command: Command) -> None:
        if not self._send(endpoint, command):
            lost = "the link was lost before the request was sent"
            failed = Failed(attempt_id, endpoint, FailureReason.WORKER_LOST, lost)
            self.on_events(endpoint, (failed,), time.monotonic())

    def cancel(self, attempt_id: int, endpoint: str, keep_landed: bool = False) -> None:
        """Cancel an attempt on a worker. `keep_landed`: a decode worker keeps received KV for the next attempt."""
        self._send(endpoint, link_wire.cancel(attempt_id, keep_landed))

    def request_credit(self, wanted: CreditRequest) -> None:
        """Ask a decode worker for a loan of blocks and slots. Nothing is sent to a lost worker: its loans are void."""
        self._send(wanted.endpoint, link_wire.want(wanted.blocks, wanted.slots))

    def change_role(self, worker_id: str, role: WorkerRole) -> None:
        """Command a worker to drain, then serve as `role`. Raises: NotFound, FailedPrecondition, Unavailable."""
        endpoint = endpoint_to_change(self._cluster.workers, worker_id, role)
        if endpoint is not None and not self._send(endpoint, link_wire.change_role(role)):
            raise Unavailable(f"the link to {worker_id} was lost; retry", "WORKER_LOST", RETRY_S)

    def drains(self, endpoint: str) -> None:
        """Mark a worker as draining because it refused a request; its next report will say so, too."""
        worker = self._cluster.find(endpoint)
        if worker is not None and worker.report is not None:
            self._cluster.reported(endpoint, replace(worker.report, draining=True))

    def close(self, attempt_id: int) -> None:
        del self._attempts[attempt_id]

    def on_connected(self, endpoint: str, description: WorkerDescription, epoch: int) -> None:
        role, name, versions = description.role, description.worker_id, description.versions
        logger.info("worker connected: %s %s at %s, %s", role, name, endpoint, versions)
        self._cluster.connected(endpoint, description, epoch)
        self._send(endpoint, link_wire.snapshot_request())
        self.adapters.on_connected(endpoint, description)
        self.on_change()

    def on_refused(self, endpoint: str, description: WorkerDescription | None, why: str) -> None:
        if self._cluster.refuse(endpoint, description, why):
            self.on_change()

    def on_disconnected(self, endpoint: str) -> None:
        self._cluster.disconnected(endpoint)
        self.on_change()

    def on_report(self, endpoint: str, report: WorkerReport) -> None:
        self._handed.pop(endpoint, None)
        self._cluster.reported(endpoint, report)
        self._cluster.measure(endpoint, report, time.monotonic())
        if self._cluster.caches.check(endpoint, report.cache, time.monotonic()):
            self._resync(endpoint)
        if self._cluster.tiers.check(endpoint, self._cluster.name_of(endpoint), report.tier, time.monotonic()):
            self._send(endpoint, link_wire.snapshot_request(tier=True))
        self.on_capacity()

    def on_cache_changes(self, endpoint: str, changes: CacheUpdate) -> None:
        if self._cluster.caches.take_changes(endpoint, changes, time.monotonic()):
            self._resync(endpoint)

    def on_cache_snapshot(self, endpoint: str, part: CacheSnapshotPart) -> None:
        self._cluster.caches.take_snapshot(endpoint, part, time.monotonic())

    def on_tier_changes(self, endpoint: str, changes: TierChanges) -> None:
        if self._cluster.tiers.take_changes(endpoint, changes, time.monotonic()):
            logger.info("file changes of worker %s are missing; requesting a snapshot", endpoint)
            self._send(endpoint, link_wire.snapshot_request(tier=True))

    def on_tier_snapshot(self, endpoint: str, part: TierSnapshotPart) -> None:
        self._cluster.tiers.take_snapshot(endpoint, part)

    def on_hand_over(self, endpoint: str, hand_over: link_wire.HandOver) -> None:
        """Command a worker with enough space, if any, to fetch the blocks that a leaving worker keeps for a session."""
        leaving, blocks = self._cluster.find(endpoint), len(hand_over.block_hashes)
        taking = None if leaving is None else taker(self._cluster.workers, leaving, blocks, self._handed)
        if taking is None:
            kept = "KV of a session is lost with leaving worker %s: no other worker has space for its %d blocks"
            logger.info(kept, endpoint, blocks)
            return
        self._handed[taking] += blocks
        self._send(taking, link_wire.bring(hand_over, endpoint, secrets.token_bytes(TRANSFER_ID_BYTES)))

    def on_adapter_prepared(self, endpoint: str, prepared: session_pb2.AdapterPrepared) -> None:
        self.adapters.on_prepared(endpoint, prepared)

    def on_adapter_state(self, endpoint: str, state: session_pb2.AdapterState) -> None:
        self.adapters.on_state(endpoint, state)
        self.on_change()

    def _resync(self, endpoint: str) -> None:
        wrong = self._cluster.caches.wrong(endpoint)
        logger.info("cache view of worker %s is stale (%s); requesting a snapshot", endpoint, wrong)
        self._send(endpoint, link_wire.snapshot_request())

    def on_events(self, endpoint: str, events: Iterable[AttemptEvent], now: float) -> None:
        """Deliver a worker's events. Events about attempts that were not placed on this worker are dropped."""
        attempts = self._attempts
        for event in events:
            attempt = attempts.get(event.attempt_id)
            if attempt is not None and endpoint in attempt.endpoints:
                attempt.inbox.put(event, now)

    def on_lost(self, endpoint: str, why: str, end: LinkEnd) -> None:
        now = time.monotonic()
        self._cluster.lost(endpoint, end, now)
        self.adapters.on_lost(endpoint)
        reason = FailureReason.WORKER_DIED if end is LinkEnd.GONE else FailureReason.WORKER_LOST
        for attempt_id, attempt in self._attempts.items():
            if endpoint in attempt.endpoints:
                attempt.inbox.put(Failed(attempt_id, endpoint, reason, why), now)
        self._drop_unnamed(endpoint)
        self.on_change()

    def _send(self, endpoint: str, command: Command) -> bool:
        connected = self._links.get(endpoint)
        return connected is not None and connected.link.send(command)

    def _follow(self, records: Sequence[WorkerRecord], tasks: asyncio.TaskGroup) -> None:
        self._named = frozenset(record.endpoint for record in records)
        for endpoint in tuple(self._links):
            self._drop_unnamed(endpoint)
        for record in records:
            if record.endpoint not in self._links:
                self._cluster.add(record.endpoint, record.role, record.worker_id)
                timing, tls = self._timing, self._tls
                secret, greetings = self._secret, self._greetings
                link = WorkerLink(
                    record.endpoint, self._router_id, self, timing, tls, secret=secret, greetings=greetings
                )
                task = tasks.create_task(link.run(), name=f"link {record.endpoint}")
                self._links[record.endpoint] = _Connected(link, task)

    def _drop_unnamed(self, endpoint: str) -> None:
        connected = self._links.get(endpoint)
        if connected is not None and endpoint not in self._named and not connected.link.held:
            del self._links[endpoint]
            connected.task.cancel()
            self._cluster.remove(endpoint)
