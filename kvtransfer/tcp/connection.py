"""TCP connection, plain or with TLS, that sends from memory and receives into memory without intermediate copies."""

import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from baton.kvtransfer.transport import LinkBroken, PeerUnreachable

MOST_PLACES = 1024  # maximum number of memory ranges of a system call: IOV_MAX of Linux
PIECE_BYTES = 4 << 20
PIECE_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 2.0  # seconds, limits the wait if a firewall drops all packets
RECEIVED_BYTES, SENT_BYTES = 256 << 10, 64 << 10  # maximum bytes per system call with TLS: several records
KEEPALIVE_S, KEEPALIVE_PROBES = 1, 4  # seconds and count; detect in about 5 s that the peer's host is gone

Secure = Callable[[ssl.MemoryBIO, ssl.MemoryBIO], ssl.SSLObject]
"""Function that creates this end of a TLS connection over two memory buffers. Raises: OSError."""


class _Plain:
    """Stream without TLS: moves several memory ranges in one system call, without the GIL."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def receive(self, places: list[memoryview]) -> int:
        """Receive bytes until all `places` are full or the timeout has passed.

        Return the number of received bytes; 0 at the end of the stream.
        """
        return self._socket.recvmsg_into(places, 0, socket.MSG_WAITALL)[0]

    def send(self, places: list[memoryview]) -> int:
        return self._socket.sendmsg(places)


class _Secured:
    """Stream with TLS: unlike Python's TLS sockets, moves several records of up to 16 KiB in one system call."""

    def __init__(self, connected: socket.socket, secure: Secure, timeout_s: float) -> None:
        """Perform the handshake. Raises: OSError, also if the peer refuses or `timeout_s` has passed."""
        deadline = time.monotonic() + timeout_s
        self._socket = connected
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._buffer = memoryview(bytearray(RECEIVED_BYTES))
        self._tls = secure(self._incoming, self._outgoing)
        while self._shakes_hands():
            if not self._fetch():
                raise ConnectionError("the peer closed the connection")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no handshake within {timeout_s:g} s")

    def receive(self, places: list[memoryview]) -> int | None:
        """Receive bytes into the first of `places`; return the number of bytes, or None without a complete record."""
        try:
            return cast("int", self._tls.read(places[0].nbytes, places[0]))  # typeshed declares bytes
        except ssl.SSLZeroReturnError:
            return 0
        except ssl.SSLWantReadError:
            return None if self._fetch() else 0

    def send(self, places: list[memoryview]) -> int:
        sent = 0
        for place in places:
            rest = place[: SENT_BYTES - sent]
            while rest:
                written = self._tls.write(rest)
                rest, sent = rest[written:], sent + written
        self._flush()
        return sent

    def _shakes_hands(self) -> bool:
        """Continue the handshake; return whether it needs more bytes from the peer."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return True
        finally:
            self._flush()  # also sends the peer the reason if the handshake failed
        return False

    def _fetch(self) -> bool:
        received = self._socket.recv_into(self._buffer)
        self._incoming.write(self._buffer[:received])
        return received > 0

    def _flush(self) -> None:
        self._socket.sendall(self._outgoing.read())


class Connection:
    """Connection over which blocks are sent or received. Owns the socket.

    Only one thread may use it; any thread may call `abort`.
    """

    def __init__(self, connected: socket.socket, secure: Secure | None, timeout_s: float) -> None:
        """Wrap a connected socket, which is closed on failure. `timeout_s`: longest time to transfer PIECE_BYTES.

        Raises: LinkBroken.
        """
        self._socket = connected
        self._timeout_s = timeout_s
        try:
            _set_options(connected, timeout_s)
            self._stream = _Plain(connected) if secure is None else _Secured(connected, secure, timeout_s)
        except OSError as error:
            connected.close()
            raise LinkBroken(f"the connection could not be secured: {error}") from error

    def receive(self, places: Sequence[memoryview]) -> None:
        """Receive bytes until all `places` are full, in order. Raises: LinkBroken."""
        for piece in _pieces(places):
            self._move(piece, self._stream.receive)

    def receive_bytes(self, size: int) -> bytearray:
        """Receive exactly `size` bytes. Raises: LinkBroken."""
        data = bytearray(size)
        self.receive([memoryview(data)])
        return data

    def send(self, places: Sequence[memoryview]) -> None:
        """Send the bytes of all `places`, in order. Raises: LinkBroken."""
        for piece in _pieces(places):
            self._move(piece, self._stream.send)

    def wait(self) -> None:
        """Wait until bytes have arrived, the peer has closed the connection, it is lost, or `abort` was called."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll()

    def abort(self) -> None:
        """Abort the connection: pending and later calls fail immediately. Any thread may call it."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the connection is closed already

    def close(self) -> None:
        """Close the connection. No thread may be using it."""
        self._socket.close()

    def _move(self, places: list[memoryview], some: Callable[[list[memoryview]], int | None]) -> None:
        deadline = time.monotonic() + self._timeout_s
        while places:
            try:
                moved = some(places)
            except BlockingIOError as error:
                raise LinkBroken(f"no bytes moved within {self._timeout_s:g} s") from error
            except OSError as error:
                raise LinkBroken(f"the connection broke: {error}") from error
            if moved == 0:
                raise LinkBroken("the peer closed the connection")
            places = _rest(places, moved or 0)
            if places and time.monotonic() > deadline:
                raise LinkBroken(f"moving a piece of {PIECE_BYTES >> 20} MiB took longer than {self._timeout_s:g} s")


def connect(host: str, port: int, secure: Secure | None, timeout_s: float) -> Connection:
    """Connect within CONNECT_TIMEOUT_S plus `timeout_s`. Blocks. Raises: PeerUnreachable."""
    try:
        return Connection(socket.create_connection((host, port), CONNECT_TIMEOUT_S), secure, timeout_s)
    except (OSError, LinkBroken) as error:
        raise PeerUnreachable(f"{host} port {port}: {error}") from error


def _set_options(connected: socket.socket, timeout_s: float) -> None:
    """Set timeouts as socket options, because Python's own timeouts take more system calls."""
    connected.settimeout(None)
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def _pieces(places: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Split `places` into few lists, one per system call. No memory range is cut."""
    piece: list[memoryview] = []
    size = 0
    for place in places:
        if piece and (len(piece) == MOST_PLACES or size + place.nbytes > PIECE_BYTES):
            yield piece
            piece, size = [], 0
        piece.append(place)
        size += place.nbytes
    if piece:
        yield piece


def _rest(places: list[memoryview], moved: int) -> list[memoryview]:
    """Return `places` without their first `moved` bytes."""
    for index, place in enumerate(places):
        if moved < place.nbytes:
            return [place[moved:], *places[index + 1 :]]
        moved -= place.nbytes
    return []
