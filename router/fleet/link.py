"""Router's side of the link to one worker: connect, handshake, resend, read, write, and notice silence.

After a broken connection, the router reconnects to the same worker process (epoch) within grace_s, while requests
continue. The link is lost when another epoch answers, the port refuses connections, grace_s expires, or the worker is
silent for silence_s. The listener is called once for each lost link.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import grpc

from baton.process.links.channel import LinkChannel, LinkOverflow, LinkViolation, Received
from baton.process.links.hub import REPEAT_S
from baton.process.security.cluster_secret import CallProof, ClusterSecret
from baton.process.security.proofs import NOT_PROVEN, prove_call
from baton.process.security.tls import InternalTls, open_async_channel
from baton.process.serving.grpc_options import INTERNAL_CHANNEL_OPTIONS, refuses_connections
from baton.process.telemetry.spans import WallClock
from baton.process.wire_bounds import MAX_EXACT, OutOfBounds
from baton.protos import session_pb2
from baton.router.cache import wire as cache_wire
from baton.router.cache.replica import CacheSnapshotPart, CacheUpdate
from baton.router.cache.tiers import TierChanges, TierSnapshotPart
from baton.router.fleet import wire as link_wire
from baton.router.fleet.received import response_check
from baton.router.fleet.wire import Command
from baton.router.placement.cluster import LinkEnd
from baton.router.types.events import AttemptEvent
from baton.router.types.worker import WorkerDescription, WorkerReport
from baton.versions import OWN, refusal

logger = logging.getLogger(__name__)

MOST_TOGETHER = 256  # maximum cancels per message: a worker applies a message without a pause


class LinkOutbox:
    """Queue of commands to one worker. `put` never waits. A burst of cancels is sent as one message."""

    def __init__(self) -> None:
        self._waiting: deque[Command] = deque()
        self._changed = asyncio.Event()

    def put(self, command: Command) -> None:
        self._waiting.append(command)
        self._changed.set()

    async def next(self) -> Command:
        """Wait for the next message. Queued messages are not modified, since they may have to be sent again."""
        while not self._waiting:
            self._changed.clear()
            await self._changed.wait()
        first = self._waiting.popleft()
        if not (first.message.HasField("cancel") and self._next_is_cancel):
            return first
        cancels = [first.message]
        while self._next_is_cancel and len(cancels) < MOST_TOGETHER:
            cancels.append(self._waiting.popleft().message)
        return Command(session_pb2.ConnectRequest(commands=session_pb2.Commands(commands=cancels)))

    @property
    def _next_is_cancel(self) -> bool:
        return bool(self._waiting) and self._waiting[0].message.HasField("cancel")


Call = grpc.aio.StreamStreamCall[Command, session_pb2.ConnectResponse]


_METHOD = "/baton.v1.SessionService/Connect"
_REFUSALS = frozenset({grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED})


def _connect(channel: grpc.aio.Channel, proof: CallProof | None) -> Call:
    """Open the stream as the generated stub does, but with `Command.to_bytes` as serialiser."""
    begin = channel.stream_stream(
        _METHOD,
        request_serializer=Command.to_bytes,
        response_deserializer=session_pb2.ConnectResponse.FromString,
    )
    return begin() if proof is None else begin(metadata=proof.metadata)


FIRST_REPEAT_MS = round(REPEAT_S * 1e3)
"""Time after which workers repeat an unchanged report without being asked."""
_MAX_UNACKNOWLEDGED = 10_000
_ACKNOWLEDGE_EVERY = 64  # received messages per acknowledgement; `watch` acknowledges the rest
_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class LinkTiming:
    """Timeouts of a link. With the defaults of the router, a dead worker is noticed within 2 s."""

    grace_s: float  # time to reconnect after a broken connection; then the link is lost
    silence_s: float  # time without a message after which the link is lost; workers report periodically
    watch_s: float = 0.1
    greet_s: float = 1.5  # timeout of the worker's Welcome; longer than silence_s, since a starting process is busy


class LinkListener(Protocol):
    """Receiver of a link's events. It is called on the event loop and must not block."""

    def on_connected(self, endpoint: str, description: WorkerDescription, epoch: int) -> None: ...
    def on_refused(self, endpoint: str, description: WorkerDescription | None, why: str) -> None:
        """Handle a process that answers but must not be used. Called at each attempt to connect.

        `description`: None if the process sent none.
        """

    def on_disconnected(self, endpoint: str) -> None: ...
    def on_report(self, endpoint: str, report: WorkerReport) -> None: ...
    def on_events(self, endpoint: str, events: Iterable[AttemptEvent], now: float) -> None:
        """Handle the events of one message. `now`: arrival of the message, in monotonic seconds."""

    def on_cache_changes(self, endpoint: str, changes: CacheUpdate) -> None: ...
    def on_cache_snapshot(self, endpoint: str, part: CacheSnapshotPart) -> None: ...
    def on_tier_changes(self, endpoint: str, changes: TierChanges) -> None: ...
    def on_tier_snapshot(self, endpoint: str, part: TierSnapshotPart) -> None: ...
    def on_hand_over(self, endpoint: str, hand_over: link_wire.HandOver) -> None: ...
    def on_adapter_prepared(self, endpoint: str, prepared: session_pb2.AdapterPrepared) -> None: ...
    def on_adapter_state(self, endpoint: str, state: session_pb2.AdapterState) -> None: ...
    def on_lost(self, endpoint: str, why: str, end: LinkEnd) -> None:
        """Handle a lost link: pending commands will never be answered. WorkerLink continues to reconnect."""


class _LinkBroken(Exception):
    """Error: the connection must be closed; a new connection may resume the link."""


class _Refused(Exception):
    """Error: this router must not use the process at the endpoint. The message says why."""


class _WorkerSilent(Exception):
    """Error: the connection is open but the worker is silent, so the link is lost."""


class _WorkerInvalid(Exception):
    """Error: the worker sent an invalid message, so the link is closed."""


class WorkerLink:
    """Link between this router and one worker. Start `run` as a task, then call `watch`; `send` never waits."""

    def __init__(
        self,
        endpoint: str,
        router_id: bytes,
        listener: LinkListener,
        timing: LinkTiming,
        tls: InternalTls | None = None,
        refuses: Callable[[str], Awaitable[bool]] = refuses_connections,
        secret: ClusterSecret | None = None,
        greetings: asyncio.Semaphore | None = None,
    ) -> None:
        """Create a link that is not open. `greetings`: limiter of links that open at the same time; None: no limit.

        Greetings time out. Without a limit, a router that connects to thousands of workers would take longer for all of
        them than each may take, and none would succeed. A link that reconnects does not wait, since its grace is short.
        """
        self.endpoint = endpoint
        self._router_id = router_id
        self._listener = listener
        self._timing = timing
        self._tls, self._secret = tls, secret
        self._refuses = refuses
        self._greetings = greetings or asyncio.Semaphore()
        self._channel: LinkChannel[Command] = LinkChannel(_MAX_UNACKNOWLEDGED)
        self._epoch = 0  # worker's epoch while the link is open; 0: closed
        self._description: WorkerDescription | None = None  # worker's description when the link opened
        self._outbox: LinkOutbox | None = None  # None while not connected
        self._grace: asyncio.TimerHandle | None = None
        self._check = response_check()
        self._heard_at = 0.0
        self._is_silent = asyncio.Event()
        self._acknowledged = 0  # number of the last message that was acknowledged to the worker
        self._repeat_ms = FIRST_REPEAT_MS
        self._last_report: link_wire.ReportArrival | None = None  # None: no report since the last message to the worker
        self._reports = link_wire.ReportReader()

    @property
    def held(self) -> bool:
        """Whether the link is open or may still reconnect within its grace: requests on the worker may continue."""
        return self._epoch != 0

    def send(self, command: Command) -> bool:
        """Send a command, after a reconnect if necessary. Return False if the link is lost or not open yet."""
        if self._epoch == 0:
            return False
        try:
            command.message.number = self._channel.number(command)
        except LinkOverflow:
            self._lose(f"{_MAX_UNACKNOWLEDGED} messages are unacknowledged")
            return False
        if self._outbox is not None:
            self._outbox.put(command)
        return True

    async def run(self) -> None:
        """Connect, and reconnect after each lost connection, until cancelled."""
        retry_s = _FIRST_RETRY_S
        try:
            while True:
                connected = await self._connection()
                retry_s = _FIRST_RETRY_S if connected else min(2 * retry_s, _LAST_RETRY_S)
                await asyncio.sleep(retry_s)
                if self._grace is not None and await self._refuses(self.endpoint):
                    self._lose("the process is gone: its port refuses connections", LinkEnd.GONE)
        finally:
            if self._grace is not None:
                self._grace.cancel()

    async def _connection(self) -> bool:
        """Run one connection from Hello until it closes. Return whether the worker's Welcome was accepted."""
        self._heard_at = time.monotonic()
        welcomed = False
        try:
            async with AsyncExitStack() as connected:
                async with nullcontext() if self.held else self._greetings:
                    channel = open_async_channel(self.endpoint, INTERNAL_CHANNEL_OPTIONS, self._tls)
                    await connected.enter_async_context(channel)
                    proof = None if self._secret is None else prove_call(self._secret, _METHOD, self.endpoint)
                    call = _connect(channel, proof)
                    connected.callback(call.cancel)
                    async with asyncio.timeout(self._timing.greet_s):
                        await self._require_proof(call, proof)
                        await self._greet(call)
                welcomed = True
                self._is_silent.clear()
                try:
                    reading, writing = self._read(call), self._write(call, self._open_outbox())
                    await _until_one_ends(reading, writing, self._until_silent())
                finally:
                    self._outbox = None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, _LinkBroken, TimeoutError) as error:
            if isinstance(error, grpc.aio.AioRpcError) and error.code() in _REFUSALS:
                self._lose("another process answers at its endpoint", LinkEnd.GONE)
                self._listener.on_refused(self.endpoint, None, f"by the worker: {_first_line(error)}")
            self._broken(welcomed, error)
        except _Refused:
            return False
        except (_WorkerSilent, LinkViolation) as error:
            self._lose(str(error))
        except Exception as fault:  # untrusted input: an invalid message of one worker must not end the router
            why = str(fault) if isinstance(fault, _WorkerInvalid) else f"{type(fault).__name__} in its message"
            if not isinstance(fault, _WorkerInvalid):
                logger.exception("invalid message from worker %s: closing the link", self.endpoint)
            self._lose(why)
            self._listener.on_refused(self.endpoint, None, why)
        return welcomed

    async def _require_proof(self, call: Call, proof: CallProof | None) -> None:
        """Check, before anything is sent, the worker's proof that it has the cluster secret. Raises: _Refused."""
        if proof is None:
            return
        try:
            async with asyncio.timeout(self._timing.greet_s / 2):
                shown = await call.initial_metadata()
        except TimeoutError:
            if self.held:
                raise  # the worker of an open link may only be busy: connect again
            self._refuse(None, NOT_PROVEN)
        if call.done():
            await call.read()  # raises the error that ended the call
        if not proof.is_answered_by(tuple(shown)):
            self._refuse(None, NOT_PROVEN)

    async def _greet(self, call: Call) -> None:
        await call.write(link_wire.hello(self._router_id, self._channel.last_received, self._epoch))
        first = await call.read()
        if not isinstance(first, session_pb2.ConnectResponse) or first.WhichOneof("event") != "welcome":
            raise _LinkBroken("the worker's first message is not Welcome")
        self._check = response_check()
        self._check_bounds(first)
        try:
            description = link_wire.worker_description(first.welcome.worker)
        except ValueError as error:
            self._refuse(None, f"{error}: {link_wire.versions_of(first.welcome.worker.versions)} there, {OWN} here")
        if self._epoch and not (first.welcome.resumed and first.epoch == self._epoch):
            self._lose_to(description, first.epoch)
        if why := refusal(OWN, description.versions):
            self._refuse(description, why)
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        self._epoch, self._description = first.epoch, description
        self._check, self._reports = response_check(description.model.vocab_size or 1), link_wire.ReportReader()
        self._heard_at = time.monotonic()
        self._channel.acknowledge(first.welcome.received if first.welcome.resumed else 0)
        self._listener.on_connected(self.endpoint, description, first.epoch)

    def _refuse(self, description: WorkerDescription | None, why: str) -> NoReturn:
        """Refuse the process at the endpoint. An open link to an earlier process is lost. Raises: _Refused."""
        self._lose("another process answers at its endpoint", LinkEnd.GONE)
        self._listener.on_refused(self.endpoint, description, why)
        raise _Refused(why)

    def _open_outbox(self) -> LinkOutbox:
        """Open the outbox and queue again the messages that the worker has not acknowledged."""
        self._outbox, self._repeat_ms = LinkOutbox(), FIRST_REPEAT_MS
        for numbered in self._channel.unacknowledged():
            self._outbox.put(numbered.message)
        return self._outbox

    async def _read(self, call: Call) -> None:
        while isinstance(message := await call.read(), session_pb2.ConnectResponse):
            self._heard_at = time.monotonic()
            if message.epoch != self._epoch:
                raise _LinkBroken(f"a message has epoch {message.epoch}, but the link has epoch {self._epoch}")
            if not (message.HasField("report") and self._take_repeated(message)):
                self._check_bounds(message)
                self._take(message)
        raise _LinkBroken("the worker closed the stream")

    def _take_repeated(self, message: session_pb2.ConnectResponse) -> bool:
        """Process a report that equals the last one, without its checks; return False for any other report."""
        report = self._reports.repeated(message.report)
        if report is None or message.number or message.acknowledged > MAX_EXACT:
            return False
        self._channel.acknowledge(message.acknowledged)
        self._last_report = link_wire.ReportArrival(self._reports.now_us, time.monotonic())
        self._listener.on_report(self.endpoint, report)
        return True

    def _check_bounds(self, message: session_pb2.ConnectResponse) -> None:
        try:
            self._check.check(message)
        except OutOfBounds as refusal:
            raise _WorkerInvalid(f"it sent {message.WhichOneof('event')}.{refusal}") from refusal

    def _take(self, message: session_pb2.ConnectResponse) -> None:
        self._channel.acknowledge(message.acknowledged)
        if message.number == 0:
            self._take_unnumbered(message)
            return
        match self._channel.receive(message.number):
            case Received.FRESH if message.HasField("adapter_prepared"):
                self._listener.on_adapter_prepared(self.endpoint, message.adapter_prepared)
            case Received.FRESH if message.HasField("adapter_state"):
                self._listener.on_adapter_state(self.endpoint, message.adapter_state)
            case Received.FRESH:
                events = link_wire.attempt_events(message, self.endpoint)
                self._listener.on_events(self.endpoint, events, time.monotonic())
            case Received.DUPLICATE:
                return
            case Received.GAP:
                raise _LinkBroken(f"message {message.number} follows {self._channel.last_received}: one is missing")
        if self._channel.last_received - self._acknowledged >= _ACKNOWLEDGE_EVERY:
            self._acknowledge()

    def _take_unnumbered(self, message: session_pb2.ConnectResponse) -> None:
        match message.WhichOneof("event"):
            case "report":
                report = self._reports.read(message.report)
                self._last_report = link_wire.ReportArrival(self._reports.now_us, time.monotonic())
                self._listener.on_report(self.endpoint, report)
            case "cache_events":
                self._listener.on_cache_changes(self.endpoint, cache_wire.changes(message.cache_events))
            case "cache_snapshot":
                self._listener.on_cache_snapshot(self.endpoint, cache_wire.snapshot_part(message.cache_snapshot))
            case "tier_events":
                self._listener.on_tier_changes(self.endpoint, cache_wire.tier_changes(message.tier_events))
            case "tier_snapshot":
                self._listener.on_tier_snapshot(self.endpoint, cache_wire.tier_snapshot_part(message.tier_snapshot))
            case "hand_over":
                self._listener.on_hand_over(self.endpoint, message.hand_over)

    def _acknowledge(self) -> None:
        if self._outbox is not None and self._channel.last_received > self._acknowledged:
            self._outbox.put(Command(session_pb2.ConnectRequest()))

    async def _write(self, call: Call, outbox: LinkOutbox) -> None:
        while True:
            command = await outbox.next()
            message = command.message
            message.acknowledged = self._acknowledged = self._channel.last_received
            if self._last_report is not None:
                message.clock.CopyFrom(link_wire.clock(self._last_report, WallClock.now()))
                self._last_report = None
            await call.write(command)

    def watch(self, now: float, paused_s: float, silence_s: float, repeat_ms: int) -> None:
        """Acknowledge messages that no command has acknowledged, and close the connection of a silent worker.

        Call it every `timing.watch_s`. `paused_s`: time in which this router's event loop was blocked, which does not
        count as silence. `silence_s`: silence after which the worker counts as lost. `repeat_ms`: time after which it
        should repeat an unchanged report.
        """
        if self._outbox is None:
            return
        self._heard_at += paused_s
        if now - self._heard_at > silence_s:
            self._is_silent.set()
        if repeat_ms != self._repeat_ms:
            self._outbox.put(Command(session_pb2.ConnectRequest(repeat_ms=repeat_ms)))
            self._repeat_ms, self._heard_at = repeat_ms, now
        self._acknowledge()

    async def _until_silent(self) -> None:
        """Wait until `watch` finds the worker silent. Raises: _WorkerSilent."""
        await self._is_silent.wait()
        raise _WorkerSilent(f"no message for {time.monotonic() - self._heard_at:.1f} s")

    def _broken(self, welcomed: bool, error: Exception) -> None:
        """Handle the end of a connection: an open link is lost unless it reconnects within its grace."""
        if welcomed:
            logger.info("connection to worker %s closed: %s; reconnecting", self.endpoint, _first_line(error))
            self._listener.on_disconnected(self.endpoint)
        if self._epoch and self._grace is None:
            loop = asyncio.get_running_loop()
            why = f"no reconnect within {self._timing.grace_s:g} s"
            self._grace = loop.call_later(self._timing.grace_s, self._lose, why)

    def _lose_to(self, description: WorkerDescription, epoch: int) -> None:
        """Close the link as lost, because the process with this description and epoch does not continue it."""
        before = self._description
        if epoch == self._epoch:
            self._lose("the worker closed the link")
        elif before is not None and before.is_same_process(description):
            self._lose(f"the worker changed its role to {description.role}", LinkEnd.ANNOUNCED)
        else:
            self._lose("the worker restarted", LinkEnd.GONE)

    def _lose(self, why: str, end: LinkEnd = LinkEnd.CUT) -> None:
        """Close the link as lost; the next connection opens a new link."""
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        if self._epoch == 0:
            return
        logger.warning("link to worker %s lost: %s; its requests are retried", self.endpoint, why)
        self._epoch = 0
        self._acknowledged = 0
        self._channel = LinkChannel(_MAX_UNACKNOWLEDGED)
        self._listener.on_disconnected(self.endpoint)
        self._listener.on_lost(self.endpoint, why, end)


async def _until_one_ends(*works: Coroutine[Any, Any, None]) -> None:
    """Wait until one task finishes, cancel the others, and raise its exception.

    Not a TaskGroup: before Python 3.13, a group that fails just as it is cancelled swallows the cancellation.
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.cancelled():
                raise _LinkBroken("the call was cancelled")
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _first_line(error: BaseException) -> str:
    text = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
    return (text or type(error).__name__).splitlines()[0]
