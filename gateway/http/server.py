"""The HTTP server: uvicorn's connections on a socket of ours, with bounds and without its signals."""

import asyncio
import socket
from asyncio import TimerHandle, Transport
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from baton.service.security.tls import TlsFiles
from baton.service.serving.addresses import Address, check_free, refusal

ABORT = "baton.abort"
"""Extension of a request's scope: a function that ends the connection at once, unsent bytes and all."""

_MAX_HEAD_BYTES = 64 << 10
_REFUSED = b"HTTP/1.1 %s\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def connection_type(head_s: float, max_connections: int) -> type[HttpToolsProtocol]:
    """`head_s` bounds the time from a connection's beginning, or from a request's first byte, to the last header."""

    class BoundedConnection(HttpToolsProtocol):
        transport: Transport
        _head_timer: TimerHandle | None = None
        _head_bytes = 0
        _in_head = True

        def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                self._refuse(b"503 Service Unavailable")
            else:
                self._begin_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            super().data_received(data)
            if self._in_head:
                self._head_bytes += len(data)
                if self._head_bytes > _MAX_HEAD_BYTES:
                    self._refuse(b"431 Request Header Fields Too Large")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope["extensions"] = {ABORT: {"call": self.transport.abort}}
            self._begin_head()

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._stop_timer()
            super().on_headers_complete()

        def _begin_head(self) -> None:
            self._in_head, self._head_bytes = True, 0
            self._stop_timer()
            self._head_timer = self.loop.call_later(head_s, self._refuse, b"408 Request Timeout")

        def _stop_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _refuse(self, status: bytes) -> None:
            """Not while an answer to an earlier request is under way: then the connection just ends."""
            self._stop_timer()
            if self.transport.is_closing():
                return
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(_REFUSED % status)
            self.transport.close()

    return BoundedConnection


def abort_of(scope: Any) -> Callable[[], None]:
    """A function that ends the connection of a request at once; it does nothing where another server carries it."""
    extension = (scope.get("extensions") or {}).get(ABORT)
    abort: Callable[[], None] = extension["call"] if extension else lambda: None
    return abort


_BACKLOG = 1024
_SEND_BUFFER_BYTES = 128 << 10  # of the kernel, per connection; a slow reader's bytes lie there and, as many, here
_PROBE_AFTER_S, _PROBE_EVERY_S, _PROBES = 30, 10, 3
_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class HttpLimits:
    max_connections: int
    head_s: float
    idle_s: float
    stall_s: float


class HttpServer:
    """Serves one application on one address, from `start` to `stop`."""

    def __init__(self, app: ASGIApp, limits: HttpLimits, tls: TlsFiles | None = None) -> None:
        self._connection = connection_type(limits.head_s, limits.max_connections)
        self._config = uvicorn.Config(
            app,
            http=self._connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=int(max(1.0, limits.idle_s)),
        )
        self._stall_s = limits.stall_s
        self._head_s = limits.head_s
        self._tls = tls
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    @property
    def connections(self) -> int:
        return len(self._state.connections)

    async def start(self, host: str, port: int) -> int:
        """The bound port. Raises: ListenError, TlsError."""
        context = None if self._tls is None else self._tls.http_context()
        listening = listening_socket(host, port, self._stall_s)
        self._config.load()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            self._connect,
            sock=listening,
            backlog=_BACKLOG,
            ssl=context,
            ssl_handshake_timeout=None if context is None else self._head_s,
            ssl_shutdown_timeout=None if context is None else _CLOSE_S,
        )
        bound: int = listening.getsockname()[1]
        return bound

    async def stop(self) -> None:
        """Takes no more connections, gives answers that are under way a moment, and ends."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        answers = set(self._state.tasks)
        if answers:
            _, unfinished = await asyncio.wait(answers, timeout=_CLOSE_S)
            for answer in unfinished:
                answer.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)

    def _connect(self) -> asyncio.Protocol:
        return self._connection(config=self._config, server_state=self._state, app_state={})


def listening_socket(host: str, port: int, stall_s: float) -> socket.socket:
    """A bound socket; connections inherit its options. Raises: ListenError."""
    address = Address("--http-port", host, port)
    check_free(address)
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        # A peer that has gone without a word is found out: idle connections are probed, sent bytes are to be confirmed.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(stall_s * 1e3))
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise refusal(address, error) from error
    listening.setblocking(False)
    return listening
