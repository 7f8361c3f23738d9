"""The HTTP server: uvicorn's connections on a socket of ours, without its signals, its logs and its lifespan."""

import asyncio
import socket
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from gateway.connection import connection_type
from service.server import ListenError
from service.tls import TlsFiles

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
        raise ListenError(f"cannot listen on {host}:{port} for HTTP: {error}") from error
    listening.setblocking(False)
    return listening
