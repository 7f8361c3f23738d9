"""HTTP connection: uvicorn's protocol with strict checks of request heads and limits on all bytes besides content."""

import asyncio
from asyncio import Handle, TimerHandle, Transport
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from http import HTTPStatus
from typing import Any

import uvicorn
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from baton.router.http.edge.exchange import Stalled, problem_reply
from baton.router.http.edge.head import check_head
from baton.router.http.edge.problem import Problem, retry_later
from baton.router.http.edge.slots import ConnectionSlots

ABORT = "baton.abort"
"""Extension of a request's scope: a function that aborts the connection and drops unsent bytes."""
PROBES = frozenset({b"/health", b"/ready"})
"""Paths of health checks, which are served even if all connections are in use."""

_MAX_HEAD_FIELDS = 200
_MAX_HEAD_BYTES = 64 << 10  # limit of a head, and of a body's chunk headers and trailers
_EXTRA_PER_BYTE = 4  # bytes of chunk headers allowed per byte of content: chunks of two bytes need 2.5
_PIECE_BYTES = 8 << 10  # bytes parsed in one iteration of the event loop
_LINGER_S, _MAX_LINGER_BYTES = 1.0, 1 << 20  # maximum time and size of input that is dropped after an error


class _Part(Enum):
    """Part of a request to which the next received byte of a connection belongs."""

    NOTHING = "nothing"
    HEAD = "head"
    BODY = "body"


@dataclass(frozen=True, slots=True)
class WaitLimits:
    head_s: float  # maximum time from a connection's start, or a request's first byte, to the last header
    idle_s: float  # maximum time between two requests
    stall_s: float  # maximum time in which a client with too many unread bytes reads none of them


class _BoundedFlow(FlowControl):
    """Flow control of a connection. Reading stays paused while received bytes wait for parsing (`is_held`).

    Only a send that must wait for the client starts a timer, since nearly every token is a send.
    """

    is_held = False

    def __init__(self, transport: Transport, stall_s: float) -> None:
        super().__init__(transport)
        self._stall_s = stall_s

    async def drain(self) -> None:
        """Wait until the client has read enough of its answer. Raises: Stalled."""
        try:
            async with asyncio.timeout(self._stall_s):
                await super().drain()
        except TimeoutError:
            raise Stalled(f"no bytes read for {self._stall_s:g} s") from None

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()


class HttpConnection(HttpToolsProtocol):
    transport: Transport
    flow: _BoundedFlow

    def __init__(self, config: uvicorn.Config, state: ServerState, limits: WaitLimits, slots: ConnectionSlots) -> None:
        super().__init__(config=config, server_state=state, app_state={})
        self._limits = limits
        self._slots = slots
        self._timer: TimerHandle | None = None
        self._part = _Part.NOTHING
        self._extra_bytes = self._fields = 0
        self._unread = b""
        self._parsing_soon: Handle | None = None
        self._answered: RequestResponseCycle | None = None  # the request that is being answered, or the last one
        self._is_upgrade = self._has_served = self._is_refused = False

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _BoundedFlow(transport, self._limits.stall_s)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._slots.leave(self)
        self._end_answers()
        super().connection_lost(exc)

    def give_way(self) -> None:
        """Close this idle connection in favour of a new one."""
        self._stop_timer()
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._extra_bytes += len(data)
            if self._extra_bytes > _MAX_LINGER_BYTES:
                self.transport.abort()
        if self._is_refused or self.transport.is_closing():
            return
        if not self._unread and not self.pipeline and len(data) <= _PIECE_BYTES:
            self._parse(data)
            return
        self._unread += data
        self.flow.is_held = True
        self.flow.pause_reading()
        self._parse_soon()

    def _parse_soon(self) -> None:
        if self._parsing_soon is None:
            self._parsing_soon = self.loop.call_soon(self._parse_piece)

    def _parse_piece(self) -> None:
        """Parse a piece of the received bytes. A pipelined request is not parsed until its predecessor is answered."""
        self._parsing_soon = None
        if self._is_refused or self.transport.is_closing() or self.pipeline:
            return
        piece, self._unread = self._unread[:_PIECE_BYTES], self._unread[_PIECE_BYTES:]
        self._parse(piece)
        if self._unread:
            self._parse_soon()
            return
        self.flow.is_held = False
        if self.cycle is None or len(self.cycle.body) <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    def _parse(self, data: bytes) -> None:
        self._extra_bytes += len(data)
        try:
            while data:
                data = self._feed(data)
        except HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, Problem) else _malformed())
            return
        self._extra_bytes = max(0, self._extra_bytes)
        if self._extra_bytes > _MAX_HEAD_BYTES:
            what = "chunk extensions and trailers" if self._part is _Part.BODY else "request line and headers"
            self._refuse(_too_large(f"{what}: more than {_MAX_HEAD_BYTES >> 10} KiB"))

    def _feed(self, data: bytes) -> bytes:
        """Parse the data. Return the bytes that follow a head with a request to upgrade the protocol, if it has one.

        The server ignores upgrades (RFC 9110, 7.8), but the parser cannot: it would stop parsing HTTP. So a new parser
        gets the same head without the field `Upgrade`. Raises: HttpParserError.
        """
        try:
            self.parser.feed_data(data)
            return b""
        except HttpParserUpgrade as upgrade:
            head_bytes: int = upgrade.args[0]
        if not self._is_upgrade:
            raise HttpParserError
        self._is_upgrade = False
        fields = (b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade")
        version = self.parser.get_http_version().encode()
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (self.parser.get_method(), self.url, version, b"".join(fields))
        self.parser = HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it for the first parser
        self.parser.feed_data(head)
        return data[head_bytes:]

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"call": self.transport.abort}}
        self._part, self._extra_bytes, self._fields = _Part.HEAD, 0, 0
        if not self._slots.is_busy(self):
            self._start_timer(self._limits.head_s)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header field. Fields of a trailer are counted, but dropped."""
        self._fields += 1
        if self._fields > _MAX_HEAD_FIELDS:
            raise _too_large(f"more than {_MAX_HEAD_FIELDS} header fields")
        if self._part is _Part.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if self.parser.should_upgrade() and method != b"CONNECT":
            self._is_upgrade = True
            return
        check_head(method, version, self.headers)
        if self._slots.is_full and not self._slots.is_busy(self) and self.url.partition(b"?")[0] not in PROBES:
            self._slots.count("refused")
            raise _busy()
        if version == "1.0":
            self.expect_100_continue = False
        super().on_headers_complete()
        send = _send_until_close if version == "1.0" else _send
        self.cycle.send = partial(send, self.cycle)  # type: ignore[method-assign]
        self._part, self._extra_bytes = _Part.BODY, 0
        self._stop_timer()
        self._slots.begin(self)

    def on_body(self, body: bytes) -> None:
        self._extra_bytes -= (1 + _EXTRA_PER_BYTE) * len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        super().on_message_complete()
        self._part = _Part.NOTHING
        if not self._slots.is_busy(self):
            self._start_timer(self._limits.idle_s)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, partial(self._run, cycle, app))

    async def _run(self, cycle: RequestResponseCycle, app: Any, scope: Any, receive: Any, send: Any) -> None:
        """Run the application. If the connection is lost or the server stops, the request gets no answer."""
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            self.transport.abort()
            cycle.disconnected = True
        except RuntimeError:
            if not self.transport.is_closing():
                raise
            cycle.disconnected = True  # uvloop raises RuntimeError for writing to a closed transport

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()
        if self.transport.is_closing():
            return
        if self._answered is None or self._answered.response_complete:
            self._has_served = True
            self._wait()
        if self._unread:
            self._parse_soon()

    def _wait(self) -> None:
        """Start the time limit for the next request's head, or for the rest of a request that was answered early."""
        self._slots.wait(self)
        is_idle = self._has_served and self._part is _Part.NOTHING
        self._start_timer(self._limits.idle_s if is_idle else self._limits.head_s)

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._on_timer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        if self._has_served and self._part is _Part.NOTHING:
            self.transport.close()
        else:
            message = f"request line and headers did not arrive within {self._limits.head_s:g} s (--http-head-s)"
            self._refuse(Problem(HTTPStatus.REQUEST_TIMEOUT, message))

    def _refuse(self, problem: Problem) -> None:
        """Answer with the problem and close the connection. If another answer is in progress, only close."""
        self._stop_timer()
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._unread = b""
        answered = self._answered
        may_answer = answered is None or answered.response_complete or not (answered.response_started or self.pipeline)
        self._end_answers()
        if not may_answer:
            self.transport.close()
            return
        self.transport.write(_reply(problem))
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        # Read and drop unread bytes first: closing with unread bytes would reset the connection and lose the answer.
        self.transport.write_eof()
        self.flow.is_held = False
        self.flow.resume_reading()
        self._timer = self.loop.call_later(_LINGER_S, self.transport.close)

    def _end_answers(self) -> None:
        """Report the disconnect to the application for all requests. uvicorn reports it only for the newest."""
        self.pipeline.clear()
        for cycle in (self._answered, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()


async def _send(cycle: RequestResponseCycle, message: Any) -> None:
    """Send a message of an answer. Nearly every token is a chunk, which needs none of uvicorn's checks."""
    body = message.get("body")
    is_chunk = body and message.get("more_body") and cycle.chunked_encoding and not cycle.response_complete
    if is_chunk and not cycle.flow.write_paused:
        if not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    else:
        await RequestResponseCycle.send(cycle, message)


async def _send_until_close(cycle: RequestResponseCycle, message: Any) -> None:
    """Send a message of an answer to HTTP/1.0, which has no chunks: closing the connection ends the answer."""
    if message["type"] == "http.response.start":
        cycle.chunked_encoding = False
    else:
        cycle.expected_content_length = len(message.get("body", b""))
    await RequestResponseCycle.send(cycle, message)


def _malformed() -> Problem:
    return Problem(HTTPStatus.BAD_REQUEST, "the request is not well-formed HTTP/1.1", code="invalid_http")


def _too_large(message: str) -> Problem:
    return Problem(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message, code="headers_too_large")


def _busy() -> Problem:
    message = "all HTTP connections are in use (--http-max-connections of the router)"
    return retry_later(message, "too_many_connections")


def _reply(problem: Problem) -> bytes:
    problem.ends_connection = True
    reply = problem_reply(problem)
    fields = {"content-type": reply.media_type, "content-length": str(len(reply.body)), **reply.headers}
    lines = [f"HTTP/1.1 {problem.status.value} {problem.status.phrase}", *(f"{n}: {v}" for n, v in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + reply.body


def abort_of(scope: Any) -> Callable[[], None]:
    """Return a function that aborts a request's connection. With a server other than ours, it has no effect."""
    extension = (scope.get("extensions") or {}).get(ABORT)
    abort: Callable[[], None] = extension["call"] if extension else lambda: None
    return abort
