"""One TCP connection, plain or within TLS, over which bytes go from and into memory where it lies."""

import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Sequence

from baton.kvtransfer.transport import LinkBroken, PeerUnreachable

MOST_PLACES = 1024  # pieces of memory in one call: IOV_MAX of Linux
PIECE_BYTES = 4 << 20
PIECE_TIMEOUT_S = 5.0
KEEPALIVE_S, KEEPALIVE_PROBES = 1, 4  # a host that has vanished is noticed in some 5 s

Wrap = Callable[[socket.socket], socket.socket]
"""Puts a connected socket into TLS, or leaves it as it is. Raises: OSError. Bounded by the socket's timeout."""


def plain(connected: socket.socket) -> socket.socket:
    return connected


class Connection:
    """Owns the socket. One thread, but for `abort`.

    The kernel is called once for several megabytes, and the interpreter's lock is free meanwhile. TLS takes a call for
    each of its records, 16 KiB.
    """

    def __init__(self, connected: socket.socket, wrap: Wrap, timeout_s: float) -> None:
        """`timeout_s`: for a piece of PIECE_BYTES. Closes the socket where this fails. Raises: LinkBroken."""
        self._timeout_s = timeout_s
        connected.settimeout(timeout_s)
        try:
            _set_options(connected)
            self._socket = wrap(connected)
        except OSError as error:
            connected.close()
            raise LinkBroken(f"the connection could not be secured: {error}") from error
        self._secured = isinstance(self._socket, ssl.SSLSocket)
        if not self._secured:
            # The kernel waits, not Python, which would call it again for each part that the buffers hold.
            self._socket.settimeout(None)
            limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def receive(self, places: Sequence[memoryview]) -> None:
        """Fills all of them, in order. Raises: LinkBroken."""
        for piece in _pieces(places):
            self._move(piece, self._receive_some)

    def receive_bytes(self, size: int) -> bytearray:
        """Raises: LinkBroken."""
        data = bytearray(size)
        self.receive([memoryview(data)])
        return data

    def send(self, places: Sequence[memoryview]) -> None:
        """All of them, in order. Raises: LinkBroken."""
        for piece in _pieces(places):
            self._move(piece, self._send_some)

    def wait(self) -> None:
        """Until bytes can be received, or the connection is over: its peer has closed it, vanished, or `abort`."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll()

    def abort(self) -> None:
        """Any thread: what waits on it fails at once, and so does what comes."""
        try:
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # TLS's own would leave a socket that reads in clear
        except OSError:
            return  # it is over already

    def close(self) -> None:
        """No thread may be using it."""
        self._socket.close()

    def _move(self, places: list[memoryview], some: Callable[[list[memoryview]], int]) -> None:
        deadline = time.monotonic() + self._timeout_s
        while places:
            try:
                moved = some(places)
            except (TimeoutError, BlockingIOError) as error:  # the latter is the kernel's
                raise LinkBroken(f"nothing moved within {self._timeout_s:g} s") from error
            except OSError as error:
                raise LinkBroken(f"the connection broke: {error}") from error
            if moved == 0:
                raise LinkBroken("the peer closed the connection")
            places = _rest(places, moved)
            if places and time.monotonic() > deadline:
                raise LinkBroken(f"a piece took longer than {self._timeout_s:g} s")

    def _receive_some(self, places: list[memoryview]) -> int:
        if self._secured:
            return self._socket.recv_into(places[0])
        return self._socket.recvmsg_into(places, 0, socket.MSG_WAITALL)[0]

    def _send_some(self, places: list[memoryview]) -> int:
        return self._socket.send(places[0]) if self._secured else self._socket.sendmsg(places)


def connect(host: str, port: int, wrap: Wrap, timeout_s: float) -> Connection:
    """Blocks, for a few times `timeout_s` at most. Raises: PeerUnreachable."""
    try:
        return Connection(socket.create_connection((host, port), timeout_s), wrap, timeout_s)
    except (OSError, LinkBroken) as error:
        raise PeerUnreachable(f"{host} port {port}: {error}") from error


def _set_options(connected: socket.socket) -> None:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def _pieces(places: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """As few as may be, none of which has more than one call takes; a place is never cut."""
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
    """Without the first `moved` bytes."""
    for index, place in enumerate(places):
        if moved < place.nbytes:
            return [place[moved:], *places[index + 1 :]]
        moved -= place.nbytes
    return []
