"""HTTP server: uvicorn's connections on sockets of our own, with limits and without uvicorn's signal handlers."""

import asyncio
import errno
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from baton.process.security.tls import TlsFiles
from baton.process.serving.addresses import Address, check_free, refusal
from baton.router.http.edge.connection import HttpConnection, WaitLimits
from baton.router.http.edge.slots import ConnectionSlots

_BACKLOG = 1024
_SEND_BUFFER_BYTES = 128 << 10  # kernel's buffer per connection; for a slow reader, this process buffers as much again
_PROBE_AFTER_S, _PROBE_EVERY_S, _PROBES = 30, 10, 3
_CLOSE_S = 2.0
_ACCEPTED_AT_ONCE = 16
_ACCEPT_PAUSE_S = 0.2
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    max_connections: int
    head_s: float
    idle_s: float
    stall_s: float


class _Opening:
    """Accepted connection that is waiting for its first byte, or is in its TLS handshake."""

    def __init__(self, accepted: socket.socket, silence_s: float) -> None:
        """Start to wait for the first byte. `silence_s`: maximum time until it must arrive."""
        self.accepted = accepted
        self.silence: asyncio.TimerHandle | None = asyncio.get_running_loop().call_later(silence_s, self.give_way)

    def give_way(self) -> None:
        """Close by shutting the socket down: cancelling the handshake would leave uvloop's transport half open."""
        with suppress(OSError):
            self.accepted.shutdown(socket.SHUT_RDWR)

    def end_silence(self) -> None:
        """Stop the timer and the watch for the first byte."""
        if self.silence is not None:
            self.silence.cancel()
            self.silence = None
            asyncio.get_running_loop().remove_reader(self.accepted)


class HttpServer:
    """HTTP server of one application. It serves from the first `start` to `stop`."""

    def __init__(self, app: ASGIApp, limits: HttpLimits, tls: TlsFiles | None = None) -> None:
        self._config = uvicorn.Config(
            app,
            http=HttpConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
        )
        self._limits = limits
        self._wait_limits = WaitLimits(limits.head_s, limits.idle_s, limits.stall_s)
        self._tls = tls
        self._tls_context: ssl.SSLContext | None = None
        self._state = ServerState()
        self._listening: list[socket.socket] = []
        self._shared: list[socket.socket] = []  # those of `_listening` whose port other processes share
        self._resuming: asyncio.TimerHandle | None = None
        self._opening = set[_Opening]()
        self._tasks = set[asyncio.Task[None]]()
        self.slots = ConnectionSlots(limits.max_connections)

    @property
    def connections(self) -> int:
        return len(self._state.connections) + len(self._opening)

    async def start(self, address: Address, shared: bool = False) -> int:
        """Begin to listen on an address, and return the bound port. Raises: ListenError, TlsError.

        `shared`: other processes listen on the port, too; `leave` ends this.
        """
        if not self._config.loaded:
            self._tls_context = None if self._tls is None else self._tls.http_context()
            self.slots.fit_open_files()
            self._config.load()
        listening = listening_socket(address, self._limits.stall_s, shared)
        self._listening.append(listening)
        if shared:
            self._shared.append(listening)
        self._accept_on()
        bound: int = listening.getsockname()[1]
        return bound

    def leave(self) -> None:
        """Stop listening on shared ports, and close connections after their present answer: their clients' next
        connections go to other processes.
        """
        for listening in self._shared:
            for _ in range(_BACKLOG // _ACCEPTED_AT_ONCE):  # closing the socket resets connections in its queue
                self._accept(listening)
            self._close_listening(listening)
        self._shared.clear()
        for connection in list(self._state.connections):
            if isinstance(connection, HttpConnection) and connection.cycle is not None:
                connection.shutdown()

    def _close_listening(self, listening: socket.socket) -> None:
        self._listening.remove(listening)
        asyncio.get_running_loop().remove_reader(listening)
        listening.close()

    async def stop(self) -> None:
        """Stop listening, wait up to 2 s for running answers, and close all connections."""
        if self._resuming is not None:
            self._resuming.cancel()
        for listening in list(self._listening):
            self._close_listening(listening)
        for opening in list(self._opening):
            if opening.silence is None:
                opening.give_way()
            else:
                self._close(opening)
        for connection in list(self._state.connections):
            connection.shutdown()
        answers = set(self._state.tasks)
        if answers:
            _, unfinished = await asyncio.wait(answers, timeout=_CLOSE_S)
            for connection in list(self._state.connections):
                connection.transport.abort()
            _, unfinished = await asyncio.wait(unfinished, timeout=_CLOSE_S) if unfinished else (set(), set())
            for answer in unfinished:
                answer.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)

    def _accept_on(self) -> None:
        self._resuming = None
        for listening in self._listening:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        """Accept connections. Pause if no file descriptor is free: uvloop's own server would reset connections."""
        loop = asyncio.get_running_loop()
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, _address = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTORS:
                    continue  # the client disconnected before it was accepted
                self.slots.shrink("no_descriptors")
                loop.remove_reader(listening)
                self._resuming = loop.call_later(_ACCEPT_PAUSE_S, self._accept_on)
                return
            accepted.setblocking(False)
            self.slots.make()
            opening = _Opening(accepted, self._limits.head_s)
            self.slots.wait(opening)
            self._opening.add(opening)
            loop.add_reader(accepted, self._on_first_byte, opening)

    def _on_first_byte(self, opening: _Opening) -> None:
        try:
            begins = opening.accepted.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            begins = b""
        if not begins:
            self._close(opening)
            return
        opening.end_silence()
        task = asyncio.get_running_loop().create_task(self._open(opening))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _close(self, opening: _Opening) -> None:
        opening.end_silence()
        opening.accepted.close()
        self._leave(opening)

    def _leave(self, opening: _Opening) -> None:
        self._opening.discard(opening)
        self.slots.leave(opening)

    async def _open(self, opening: _Opening) -> None:
        context = self._tls_context
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._connect,
                opening.accepted,
                ssl=context,
                ssl_handshake_timeout=None if context is None else self._limits.head_s,
                ssl_shutdown_timeout=None if context is None else _CLOSE_S,
            )
        except OSError:
            opening.accepted.close()  # the TLS handshake failed or timed out
        finally:
            self._leave(opening)

    def _connect(self) -> asyncio.Protocol:
        return HttpConnection(self._config, self._state, self._wait_limits, self.slots)


def listening_socket(address: Address, stall_s: float, shared: bool) -> socket.socket:
    """Create a listening socket. Its connections inherit its options. Raises: ListenError.

    `shared`: other processes of this user may listen on the port, too.
    """
    check_free(address, shared)
    listening = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        # To detect vanished clients: idle connections are probed, and sent bytes must be acknowledged.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(stall_s * 1e3))
        listening.bind((address.host, address.port))
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise refusal(address, error) from error
    listening.setblocking(False)
    return listening
