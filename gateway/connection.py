"""One HTTP connection, bounded where uvicorn's own is not: by the time and size of a head, and in how it is cut off."""

from asyncio import TimerHandle, Transport
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

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
