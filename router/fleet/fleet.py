"""The sessions with all workers that membership names, and the attempts that wait for their events.

Membership lists the endpoints; the session describes the worker. A worker that leaves membership is kept as long as
its session is up: it may be draining, or only the registry has forgotten it. Events go to the inbox of their attempt;
an attempt that is no longer read is an old one, and its events are dropped.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.router.admission.queue import CreditRequest
from baton.router.cache import wire as cache_wire
from baton.router.cache.replica import CacheChanges, CacheSnapshotPart
from baton.router.fleet import wire as session_wire
from baton.router.fleet.inbox import Inbox, WakeUpLimiter
from baton.router.fleet.session import SessionTiming, WorkerSession
from baton.router.placement.cluster import Cluster, End
from baton.router.placement.decide import Placement
from baton.router.placement.planner import endpoint_to_change
from baton.router.types.events import AttemptEvent, Failed, FailureReason
from baton.router.types.request import PreparedRequest
from baton.router.types.worker import WorkerDescription, WorkerReport
from baton.service.errors import Unavailable
from baton.service.registry.membership import MembershipSource
from baton.service.registry.worker_record import WorkerRecord, WorkerRole
from baton.service.security.tls import InternalTls

logger = logging.getLogger(__name__)
RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class _Open:
    inbox: Inbox[Any]
    placement: Placement


@dataclass(frozen=True, slots=True)
class _Connected:
    session: WorkerSession
    task: asyncio.Task[None]


class Fleet:
    """Owns the sessions. `on_change` is called when there may be more room, or fewer workers, than before."""

    def __init__(
        self,
        cluster: Cluster,
        timing: SessionTiming,
        on_change: Callable[[], None],
        router_id: bytes | None = None,
        tls: InternalTls | None = None,
    ) -> None:
        """`router_id`: 16 random bytes, of this process; None: drawn here."""
        self._cluster = cluster
        self._timing = timing
        self._tls = tls
        self._router_id = router_id or secrets.token_bytes(16)
        self._sessions: dict[str, _Connected] = {}
        self._named: frozenset[str] = frozenset()  # endpoints in membership
        self._attempts: dict[int, _Open] = {}
        self.wake_ups = WakeUpLimiter()
        """Shared by the inboxes of all requests."""
        self.on_change = on_change

    async def follow(self, membership: MembershipSource) -> None:
        """Keeps a session with every worker that membership names, until cancelled. A bug in one ends all."""
        async with asyncio.TaskGroup() as tasks:
            async for records in membership.watch():
                self._follow(records, tasks)

    def open(self, attempt_id: int, placement: Placement, inbox: Inbox[Any]) -> None:
        """From now on its workers' events about this attempt go to the inbox, until `close`."""
        self._attempts[attempt_id] = _Open(inbox, placement)

    def dispatch(self, tag: session_wire.Tag, request: PreparedRequest, placement: Placement) -> None:
        """Sends the commands at once. A worker that was lost since it was chosen is reported to the inbox."""
        commands = [(placement.decode, session_wire.start(tag, request, placement.prefill))]
        if placement.prefill is not None:
            commands.append((placement.prefill, session_wire.prefill(tag, request, placement)))
        for endpoint, command in commands:
            self._send_attempt(tag.attempt_id, endpoint, command)

    def adopt(self, tag: session_wire.Tag, router_id: bytes, attempt_id: int, endpoint: str) -> None:
        """Has a decode worker continue an answer that it makes for that router. A lost worker fails the attempt."""
        self._send_attempt(tag.attempt_id, endpoint, session_wire.adopt(router_id, attempt_id, tag))

    def _send_attempt(self, attempt_id: int, endpoint: str, command: session_wire.Command) -> None:
        if not self._send(endpoint, command):
            lost = "the worker was lost before the request was sent"
            self.on_event(Failed(attempt_id, endpoint, FailureReason.WORKER_LOST, lost))

    def cancel(self, attempt_id: int, endpoint: str, keep_landed: bool = False) -> None:
        """`keep_landed`: to a decode worker, its blocks of the prompt are of use to the next attempt."""
        self._send(endpoint, session_wire.cancel(attempt_id, keep_landed))

    def request_credit(self, wanted: CreditRequest) -> None:
        """Asks a decode worker for a loan to this router. A lost worker has forgotten it."""
        self._send(wanted.endpoint, session_wire.want(wanted.blocks, wanted.slots))

    def change_role(self, worker_id: str, role: WorkerRole) -> None:
        """Has a worker drain and then serve in another role. Raises: NotFound, FailedPrecondition, Unavailable."""
        endpoint = endpoint_to_change(self._cluster.workers, worker_id, role)
        if endpoint is not None and not self._send(endpoint, session_wire.change_role(role)):
            raise Unavailable(f"{worker_id} was lost", "WORKER_LOST", RETRY_S)

    def drains(self, endpoint: str) -> None:
        """A worker refused a request since it drains: it is sent no others, even before its next report."""
        worker = self._cluster.find(endpoint)
        if worker is not None and worker.report is not None:
            self._cluster.reported(endpoint, replace(worker.report, draining=True))

    def close(self, attempt_id: int) -> None:
        del self._attempts[attempt_id]

    def on_connected(self, endpoint: str, description: WorkerDescription, epoch: int) -> None:
        logger.info("%s %s at %s is connected", description.role, description.worker_id, endpoint)
        self._cluster.connected(endpoint, description, epoch)
        self._send(endpoint, cache_wire.snapshot_request())
        self.on_change()

    def on_disconnected(self, endpoint: str) -> None:
        self._cluster.disconnected(endpoint)
        self.on_change()

    def on_report(self, endpoint: str, report: WorkerReport) -> None:
        self._cluster.reported(endpoint, report)
        self._cluster.measure(endpoint, report, time.monotonic())
        if self._cluster.caches.check(endpoint, report.cache, time.monotonic()):
            self._resync(endpoint)
        self.on_change()

    def on_cache_changes(self, endpoint: str, changes: CacheChanges) -> None:
        if self._cluster.caches.take_changes(endpoint, changes, time.monotonic()):
            self._resync(endpoint)

    def on_cache_snapshot(self, endpoint: str, part: CacheSnapshotPart) -> None:
        self._cluster.caches.take_snapshot(endpoint, part, time.monotonic())

    def _resync(self, endpoint: str) -> None:
        wrong = self._cluster.caches.wrong(endpoint)
        logger.info("cache view of %s is stale (%s); requesting a snapshot", endpoint, wrong)
        self._send(endpoint, cache_wire.snapshot_request())

    def on_event(self, event: AttemptEvent) -> None:
        attempt = self._attempts.get(event.attempt_id)
        if attempt is not None:
            attempt.inbox.put(event, time.monotonic())

    def on_lost(self, endpoint: str, why: str, end: End) -> None:
        now = time.monotonic()
        self._cluster.lost(endpoint, end, now)
        reason = FailureReason.WORKER_DIED if end is End.GONE else FailureReason.WORKER_LOST
        for attempt_id, attempt in self._attempts.items():
            if endpoint in attempt.placement.endpoints:
                attempt.inbox.put(Failed(attempt_id, endpoint, reason, why), now)
        self._drop_unnamed(endpoint)
        self.on_change()

    def _send(self, endpoint: str, command: session_wire.Command) -> bool:
        connected = self._sessions.get(endpoint)
        return connected is not None and connected.session.send(command)

    def _follow(self, records: Sequence[WorkerRecord], tasks: asyncio.TaskGroup) -> None:
        self._named = frozenset(record.endpoint for record in records)
        for endpoint in tuple(self._sessions):
            self._drop_unnamed(endpoint)
        for record in records:
            if record.endpoint not in self._sessions:
                self._cluster.add(record.endpoint, record.role)
                session = WorkerSession(record.endpoint, self._router_id, self, self._timing, self._tls)
                task = tasks.create_task(session.run(), name=f"session {record.endpoint}")
                self._sessions[record.endpoint] = _Connected(session, task)

    def _drop_unnamed(self, endpoint: str) -> None:
        connected = self._sessions.get(endpoint)
        if connected is not None and endpoint not in self._named and not connected.session.held:
            del self._sessions[endpoint]
            connected.task.cancel()
            self._cluster.remove(endpoint)
