"""Session service of both roles: links with routers, open requests, drain."""

import asyncio
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Generic

import grpc

from baton.engine.kv_cache.sessions import KeptBlocks
from baton.engine.request import RequestRefused
from baton.engine.runner.loop import EngineLoop
from baton.engine.runner.step_records import StepRecord
from baton.engine.sampling.constraint import Grammars
from baton.engine.scheduler.sequences import SchedulerOutcome
from baton.process.errors import FailedPrecondition, InvalidArgument
from baton.process.links.connection import serve_connection
from baton.process.links.hub import LinkHub
from baton.process.telemetry.clock_offset import ClockEstimate
from baton.process.telemetry.logs import SeldomLog
from baton.process.telemetry.spans import Telemetry, WallClock
from baton.process.wire_bounds import OutOfBounds
from baton.protos import kept_session_pb2, session_pb2, session_pb2_grpc
from baton.versions import OWN, announced, refusal
from baton.worker.adapters.engine import EngineAdapters
from baton.worker.adapters.keeper import AdapterKeeper, Surroundings
from baton.worker.adapters.table import AdapterTable
from baton.worker.cache_events import CacheEventPublisher
from baton.worker.incoming.commands import CommandCheck, attempt_of
from baton.worker.local_kv import LocalKv
from baton.worker.request import AttemptKey, Link, Open, RequestTable
from baton.worker.spans import WorkerClock, write_spans
from baton.worker.tier.announce import TierPublisher
from baton.worker.times import RequestLog, RequestTimes
from baton.worker.transfer.hand_over import BlockTaker
from baton.worker.transfer.reader import TransferReader
from baton.worker.wire import Limit, send_report, session_turn, worker_report

logger = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 1.0  # longest wait for the delivery of last messages, and for running copies
MAX_UNACKNOWLEDGED = 65536  # unacknowledged messages after which a router loses its link
NOTICE_S = 0.3  # time between the report of a drain and the first refusal, for requests that are on their way
ADAPTER_PROTOCOL = 2
"""Oldest protocol whose routers handle changes of adapters and report which adapters they need."""
ChangeRole = Callable[[session_pb2.Role], None]
FaultHandler = Callable[[BaseException], None]


@dataclass(frozen=True, slots=True)
class LoadedAdapters:
    """Adapters of a worker process; they outlive its roles."""

    table: AdapterTable
    engine: EngineAdapters
    on_fault: FaultHandler


@dataclass(frozen=True, slots=True)
class ServiceParts:
    """Engine and other parts of a session service."""

    loop: EngineLoop
    grammars: Grammars | None = None  # None: no structured output
    kv: LocalKv = field(default_factory=LocalKv)
    taker: BlockTaker | None = None  # None: sessions of other workers are not taken over
    adapters: LoadedAdapters | None = None  # None: routers cannot add adapters
    change_role: ChangeRole | None = None  # None: the role is fixed
    telemetry: Telemetry | None = None


def _check_protocol(hello: session_pb2.Hello) -> int:
    """Return the newest protocol of the router. Raises: FailedPrecondition, which names the versions of both sides."""
    theirs = announced(hello.versions.release, hello.versions.protocol, hello.versions.oldest_protocol)
    refused = refusal(OWN, theirs)
    if refused:
        logger.warning("link refused: router %s: %s", hello.router_id.hex()[:8], refused)
        raise FailedPrecondition("hello.versions", refused)
    return theirs.protocol


class SessionService(session_pb2_grpc.SessionServiceServicer, ABC, Generic[Open]):
    """Servicer of SessionService with the table of open requests. Lives on the event loop."""

    role_name: str

    def __init__(
        self,
        worker: session_pb2.WorkerInfo,
        epoch: int,
        session_grace_s: float,
        table: RequestTable[Open],
        parts: ServiceParts,
    ) -> None:
        """Create a service. `worker`: description that routers receive."""
        self._worker = worker
        self._epoch = epoch
        self._hub: LinkHub[session_pb2.ConnectResponse] = LinkHub(
            session_grace_s, MAX_UNACKNOWLEDGED, self._on_link_end
        )
        self.cache = CacheEventPublisher(self._hub, epoch)
        self._files = TierPublisher(self._hub, epoch)
        self._requests = table
        self._request_ids = itertools.count(1)
        self._telemetry = parts.telemetry
        self.log = RequestLog(on_end=self._trace)
        self._clocks: dict[bytes, ClockEstimate] = {}  # estimated clock of each router, by router id
        self._protocols: dict[bytes, int] = {}  # newest protocol of each router, by router id
        self._checks = CommandCheck(worker)
        self._refusals = SeldomLog(logger)
        self.leaving = False
        """True while reports say that the worker drains."""
        self.draining = False
        """True while new requests are refused."""
        self.broken = False
        """True once the engine failed. Other workers do not continue the open requests, since one may have caused the
        failure.
        """
        self._loop = parts.loop
        self._grammars = parts.grammars
        self._kv = parts.kv
        self._taker = parts.taker
        self._change_role = parts.change_role
        self.adapters = None if parts.adapters is None else self._keep_adapters(parts.adapters, parts.loop)

    @property
    def busy(self) -> bool:
        return len(self._requests) > 0

    @property
    def hands_over(self) -> bool:
        """Return whether other workers continue the open requests when this worker stops."""
        return self.leaving and not self.broken

    async def Connect(
        self,
        request_iterator: AsyncIterator[session_pb2.ConnectRequest],
        context: "grpc.aio.ServicerContext[session_pb2.ConnectRequest, session_pb2.ConnectResponse]",
    ) -> AsyncIterator[session_pb2.ConnectResponse]:
        commands = self._noting_clocks(request_iterator)
        connection = serve_connection(self._hub, self._epoch, commands, self._welcome, self._on_command)
        async with aclosing(connection):
            async for message in connection:
                yield message

    def _trace(self, times: RequestTimes) -> None:
        if self._telemetry is not None:
            asyncio.get_running_loop().call_soon(self._write_spans, self._telemetry, times)

    def _write_spans(self, telemetry: Telemetry, times: RequestTimes) -> None:
        estimate = self._clocks.get(times.router_id)
        clock = WorkerClock(WallClock.now(), None if estimate is None else estimate.best)
        write_spans(telemetry, times, self._worker.worker_id, self.role_name, clock)

    async def _noting_clocks(
        self, commands: AsyncIterator[session_pb2.ConnectRequest]
    ) -> AsyncIterator[session_pb2.ConnectRequest]:
        """Yield all commands of one router, after checking its greeting and recording its clocks."""
        estimate: ClockEstimate | None = None
        async for command in commands:
            if estimate is None:
                estimate = self._greeted(command.hello)
            elif command.HasField("clock"):
                try:
                    self._checks.clock(clock := command.clock)
                except OutOfBounds as refusal:
                    self._refusals.warning("clock", "router clock ignored: %s", refusal)
                else:
                    estimate.take(clock.echo_us / 1e6, time.monotonic(), clock.kept_us / 1e6, clock.wall_us / 1e6)
            yield command

    def _greeted(self, hello: session_pb2.Hello) -> ClockEstimate:
        """Check a greeting; return the estimate of the router's clock. Raises: InvalidArgument, FailedPrecondition."""
        try:
            self._checks.hello(hello)
        except OutOfBounds as refusal:
            raise InvalidArgument("hello", str(refusal)) from refusal
        self._protocols[hello.router_id] = _check_protocol(hello)
        return self._clocks.setdefault(hello.router_id, ClockEstimate())

    async def close(self) -> None:
        """Close all links and end the remaining requests.

        After a drain, each remaining request is reported as failed, and another worker continues it.
        """
        if self.hands_over:
            self.draining = True
            for request in self._requests:
                self._fail(request, session_pb2.FAILURE_REASON_DRAINING, f"the {self.role_name} worker is stopping")
            await self._hub.delivered(CLOSE_TIMEOUT_S)
        await self._hub.close(CLOSE_TIMEOUT_S)

    @abstractmethod
    def on_outcomes(self, outcomes: Sequence[SchedulerOutcome], step: StepRecord) -> None:
        """Process the outcomes of a step, on the event loop, in the order of the steps."""

    @abstractmethod
    def report(self) -> None:
        """Send every router a report of this worker."""

    @abstractmethod
    def _on_role_command(self, link: Link, command: session_pb2.ConnectRequest) -> bool:
        """Carry out a command of this role; return False for any other."""

    @abstractmethod
    def _abandon(self, request: Open) -> None:
        """End a request in any phase and release its resources."""

    def _on_cancel(self, request: Open, command: session_pb2.Cancel) -> None:
        self._abandon(request)

    def _welcome(self, resumed: bool, received: int) -> session_pb2.ConnectResponse:
        welcome = session_pb2.Welcome(resumed=resumed, received=received, worker=self._worker)
        return session_pb2.ConnectResponse(epoch=self._epoch, welcome=welcome)

    def _on_command(self, link: Link, command: session_pb2.ConnectRequest) -> None:
        """Execute a command. An invalid or failing command ends its own request only."""
        try:
            self._checks.command(command)
        except OutOfBounds as refusal:
            self._refuse(link, command, session_pb2.FAILURE_REASON_INVALID, str(refusal))
            return
        try:
            self._carry_out(link, command)
        except Exception as fault:  # the process continues after a failed command
            logger.exception("router command failed: %s", command.WhichOneof("command"))
            request = self._open_request(link, command)
            if request is not None:
                self._fail_unforeseen(request)
            else:
                why = f"internal error of the {self.role_name} worker: {type(fault).__name__}"
                self._refuse(link, command, session_pb2.FAILURE_REASON_UNSPECIFIED, why)

    def _open_request(self, link: Link, command: session_pb2.ConnectRequest) -> Open | None:
        attempt_id = attempt_of(command)
        return None if attempt_id is None else self._requests.of_attempt(AttemptKey(link.router_id, attempt_id))

    def _refuse(
        self,
        link: Link,
        command: session_pb2.ConnectRequest,
        reason: "session_pb2.FailureReason",
        why: str,
    ) -> None:
        """Send a failure for a refused command, if the router waits for an answer."""
        name, attempt_id = command.WhichOneof("command"), attempt_of(command)
        self._refusals.warning(str(name), "router command refused: %s: %s", name, why)
        if attempt_id is not None and self._open_request(link, command) is None:
            self._send_failed(link, attempt_id, reason, why)
        elif name == "prepare_adapter" and not command.prepare_adapter.drop:
            refused = session_pb2.AdapterPrepared(change_id=command.prepare_adapter.change_id, refusal=why)
            self._send(link, session_pb2.ConnectResponse(adapter_prepared=refused))

    def _carry_out(self, link: Link, command: session_pb2.ConnectRequest) -> None:
        match command.WhichOneof("command"):
            case "snapshot_request" if not command.snapshot_request.tier:
                self.cache.send_snapshot(link)
            case "snapshot_request":
                if self._kv.tier is not None:
                    self._files.send_snapshot(link, self._kv.tier.files)
            case "cancel":
                request = self._requests.of_attempt(AttemptKey(link.router_id, command.cancel.attempt_id))
                if request is not None:
                    self._on_cancel(request, command.cancel)
            case "bring":
                self._bring_session(command.bring)
            case "prepare_adapter" if self.adapters is not None:
                self.adapters.prepare(link, command.prepare_adapter)
            case "adapter_list" if self.adapters is not None:
                self.adapters.take_list(link, command.adapter_list)
            case "change_role" if self._change_role is not None:
                self._change_role(command.change_role.role)
            case "change_role":
                logger.warning("change of role refused: this worker has a fixed role")
            case other if not self._on_role_command(link, command):
                self._refusals.warning("role", "a router sent %s to a %s worker", other, self.role_name)

    def _keep_adapters(self, loaded: LoadedAdapters, loop: EngineLoop) -> AdapterKeeper:
        around = Surroundings(
            in_use=lambda: (request.adapter for request in self._requests),
            routers=self._that_know_adapters,
            answer=self._send,
            changed=lambda: self._adapters_changed(keeper),
            fault=loaded.on_fault,
        )
        keeper = AdapterKeeper(loaded.table, loaded.engine, loop, around)
        self._describe_adapters(keeper)
        return keeper

    def _that_know_adapters(self) -> list[Link]:
        return [each for each in self._hub.links if self._protocol(each) >= ADAPTER_PROTOCOL]

    def _protocol(self, link: Link) -> int:
        """Return the newest protocol of the router at `link`."""
        return self._protocols.get(link.router_id, 1)

    def _describe_adapters(self, adapters: AdapterKeeper) -> None:
        del self._worker.adapters[:]
        self._worker.adapters.extend(adapters.choosable)
        self._worker.adapter_state.CopyFrom(adapters.state)

    def _adapters_changed(self, adapters: AdapterKeeper) -> None:
        self._describe_adapters(adapters)
        for link in self._that_know_adapters():
            self._send(link, session_pb2.ConnectResponse(adapter_state=self._worker.adapter_state))

    def _accepts(self, request: Open, command: session_pb2.Prefill | session_pb2.Start) -> bool:
        """Set adapter and deadline of a new request and return True; fail it and return False if it is refused."""
        if self.draining:
            self._fail(request, session_pb2.FAILURE_REASON_DRAINING, f"the {self.role_name} worker is draining")
            return False
        try:
            request.adapter = self._adapter_number(command)
        except ValueError as error:
            self._fail(request, session_pb2.FAILURE_REASON_INVALID, str(error))
            return False
        self._set_deadline(request, command.time_left_ms)
        return True

    def _adapter_number(self, command: session_pb2.Prefill | session_pb2.Start) -> int:
        """Return the engine's number of the requested adapter, 0 for none. Raises: ValueError."""
        if self.adapters is not None:
            return self.adapters.number(command)
        if command.adapter:
            raise ValueError(f"adapter {command.adapter!r} is not loaded on this worker")
        return 0

    def offer(self, kept: KeptBlocks) -> bool:
        """Offer a session's KV to the first connected router; return False if there is none."""
        link = next((each for each in self._hub.links if each.outbox is not None), None)
        if link is None:
            return False
        of = kept_session_pb2.KeptSession(id=kept.session_id, owner=kept.owner, keep_for_s=max(0.0, kept.left_s))
        offered = session_pb2.HandOver(session=of, block_hashes=kept.names)
        link.send_lossy(session_pb2.ConnectResponse(epoch=self._epoch, hand_over=offered))
        return True

    def _bring_session(self, bring: session_pb2.Bring) -> None:
        if self._taker is not None and not self.leaving and bring.block_hashes:
            turn = session_turn(bring.session)
            self._taker.take(bring.fetch.endpoint, bring.fetch.transfer_id, tuple(bring.block_hashes), turn)

    def _times(self, link: Link, command: session_pb2.Prefill | session_pb2.Start, number: int) -> RequestTimes:
        """Create the times of a new request, add them to the log, and return them."""
        times = RequestTimes(
            number,
            command.request_id,
            command.traceparent,
            link.router_id,
            arrived_s=time.monotonic(),
            prompt_tokens=len(command.token_ids),
        )
        self.log.begin(times)
        return times

    def tell_files(self) -> None:
        """Announce changes of the worker's KV files. Call before each report."""
        if self._kv.tier is not None:
            self._files.send_changes(self._kv.tier.files)

    def _report_to(self, link: Link, reader: TransferReader | None, limit: Limit, waiting: int = 0) -> None:
        """Send a router its report. `limit`: blocks and slots that this router may use. `reader`: None if this worker
        pulls no KV.
        """
        tier = None if self._kv.tier is None else self._kv.tier.state
        if tier is not None:
            tier.sequence = self._files.sequence
        report = worker_report(
            self._loop,
            reader,
            limit,
            waiting,
            self.leaving or self.draining,
            self.cache.sum,
            self._kv.rest_counters,
            tier,
            0 if self._taker is None else self._taker.taken_blocks,
        )
        send_report(link, self._epoch, report)

    def _is_new(self, link: Link, attempt_id: int) -> bool:
        if self._requests.of_attempt(AttemptKey(link.router_id, attempt_id)) is None:
            return True
        self._refusals.warning("twice", "duplicate attempt id %d from a router; the command is dropped", attempt_id)
        return False

    def _set_deadline(self, request: Open, time_left_ms: int) -> None:
        if request.deadline is not None:
            request.deadline.cancel()
        request.deadline = asyncio.get_running_loop().call_later(
            time_left_ms / 1e3, self._fail, request, session_pb2.FAILURE_REASON_DEADLINE, "the deadline passed"
        )

    def _on_task_ended(self, request: Open, what: str, task: "asyncio.Future[None]") -> None:
        """Fail a request whose task failed. `what`: message to log for an unexpected error."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, RequestRefused):
            self._fail(request, session_pb2.FAILURE_REASON_INVALID, str(error))
        elif error is not None:
            logger.error("%s", what, exc_info=error)
            self._fail_unforeseen(request)

    def _fail_unforeseen(self, request: Open) -> None:
        message = f"internal error of the {self.role_name} worker"
        self._fail(request, session_pb2.FAILURE_REASON_UNSPECIFIED, message)

    def _fail(self, request: Open, reason: "session_pb2.FailureReason", message: str) -> None:
        if request in self._requests:
            request.times.failure = message
            self._abandon(request)
            self._send_failed(request.link, request.attempt_id, reason, message)

    def _forget(self, request: Open) -> None:
        self._requests.forget(request)
        request.let_go()
        self.log.end(request.times)
        if self.adapters is not None and self.adapters.awaits_last:
            # called later, after the engine has released the request
            asyncio.get_running_loop().call_soon(self.adapters.free)

    def _send_failed(self, link: Link, attempt_id: int, reason: "session_pb2.FailureReason", message: str) -> None:
        failed = session_pb2.Failed(attempt_id=attempt_id, reason=reason, message=message)
        self._send(link, session_pb2.ConnectResponse(failed=failed))

    def _send(self, link: Link, message: session_pb2.ConnectResponse) -> None:
        message.epoch = self._epoch
        self._hub.send(link, message)

    def _on_link_end(self, link: Link) -> None:
        if all(each.router_id != link.router_id for each in self._hub.links):  # else the router has opened a new one
            self._clocks.pop(link.router_id, None)
            self._protocols.pop(link.router_id, None)
        for request in self._requests:
            if request.link is link:
                self._abandon(request)
        if self.adapters is not None:
            self.adapters.forget(link)


class Drain:
    """Drain of one session service, which `call_off` cancels. Lives on the event loop.

    The worker first reports that it drains, still accepting requests that routers have already sent, and then refuses
    new ones.
    """

    def __init__(self, service: SessionService[Open]) -> None:
        self._service = service
        self._notice: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        """Return whether a request is open or may still arrive."""
        service = self._service
        return service.busy or (service.leaving and not service.draining)

    def begin(self) -> None:
        if not self._service.leaving:
            self._service.leaving = True
            self._service.report()
            self._notice = asyncio.get_running_loop().call_later(NOTICE_S, self._refuse)

    def call_off(self) -> None:
        if self._notice is not None:
            self._notice.cancel()
        self._service.leaving = self._service.draining = False
        self._service.report()

    def _refuse(self) -> None:
        self._service.draining = True
