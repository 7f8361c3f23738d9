"""Source's side of KV over TCP: one thread per connection sends blocks from the pool."""

import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence

from baton.kvtransfer.slices import PoolShape, Storage, parts_of
from baton.kvtransfer.tcp.connection import PIECE_TIMEOUT_S, Connection, Secure
from baton.kvtransfer.tcp.messages import (
    MAX_PROBE_BYTES,
    REQUEST,
    BlockRequest,
    Head,
    Verdict,
    What,
    read_request,
    write_head,
)
from baton.kvtransfer.transport import BlockOutOfRange, LinkBroken, SharedMemoryUnavailable, UnknownTransfer

logger = logging.getLogger(__name__)
MOST_CONNECTIONS = 256
RETRY_S = 0.1
PROBE_PIECE = memoryview(bytes(1 << 20))

Readable = Callable[[bytes, int, int], Sequence[int]]
"""Function that returns physical blocks of a transfer, given its id, the first logical block and the number of blocks.
Any thread may call it; its wait is bounded. Raises: UnknownTransfer, BlockOutOfRange; TimeoutError if the source does
not respond.
"""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at `host` and `port`; port 0: any free port. Raises: SharedMemoryUnavailable."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=64)
    except OSError as error:
        raise SharedMemoryUnavailable(f"tcp: {host} port {port}: {error}") from error


class TcpServer:
    """Server that sends blocks of `pool`, in host memory, to readers that know `pool_id` and the id of a transfer.

    Owns `listener`. Any thread may call it. A block that is released while it is sent may arrive with wrong content;
    the reader learns this when it closes the transfer.
    """

    def __init__(
        self,
        listener: socket.socket,
        pool: Storage,
        shape: PoolShape,
        pool_id: bytes,
        secure: Secure | None,
        cores: frozenset[int] | None = None,
        timeout_s: float = PIECE_TIMEOUT_S,
    ) -> None:
        """Start the server. `timeout_s`: longest time that a reader may take to receive PIECE_BYTES.

        `cores`: CPU cores on which the threads may run; None: any.
        """
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._pool_id = pool_id
        self._secure = secure
        self._cores = cores
        self._timeout_s = timeout_s
        self._part_block_bytes = shape.part_block_bytes
        self._parts = [part.numpy().data for part in parts_of(pool, shape)]
        self._readable: Readable | None = None
        self._closed = threading.Event()
        self._lock = threading.Lock()  # guards `_connections`, so that none is added after `close`
        self._connections: set[Connection] = set()
        threading.Thread(target=self._accept, name="kv-accept", daemon=True).start()

    def __len__(self) -> int:
        return len(self._connections)

    def attach(self, readable: Readable) -> None:
        """Serve requests for blocks from `readable` from now on."""
        self._readable = readable

    def detach(self) -> None:
        """Refuse requests from now on. Responses that are being sent are completed."""
        self._readable = None

    def close(self) -> None:
        """Close all connections, without waiting for their threads."""
        with self._lock:
            self._closed.set()
            for connection in self._connections:
                connection.abort()
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the accepting thread has closed the listener already

    def _accept(self) -> None:
        if self._cores is not None:
            os.sched_setaffinity(0, self._cores)  # threads that this thread starts inherit the cores
        with self._listener:
            while not self._closed.is_set():
                try:
                    accepted, _ = self._listener.accept()
                except OSError as error:  # also raised after `close`
                    if not self._closed.wait(RETRY_S):
                        logger.warning("accepting a KV connection over TCP failed: %s; trying again", error)
                    continue
                threading.Thread(target=self._serve, args=(accepted,), name="kv-send", daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        try:
            connection = Connection(accepted, self._secure, self._timeout_s)
        except LinkBroken as error:
            logger.warning("KV connection over TCP refused: %s; the connection was closed", error)
            return
        try:
            if self._add(connection):
                while self._answer(connection):
                    connection.wait()  # connections may be idle between requests for as long as both workers run
        except LinkBroken as error:
            logger.debug("KV connection over TCP closed: %s", error)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _add(self, connection: Connection) -> bool:
        with self._lock:
            if self._closed.is_set() or len(self._connections) >= MOST_CONNECTIONS:
                return False
            self._connections.add(connection)
            return True

    def _answer(self, connection: Connection) -> bool:
        """Answer one request; return whether the connection stays open for another. Raises: LinkBroken."""
        try:
            request = read_request(connection.receive_bytes(REQUEST.size))
        except ValueError as error:
            raise LinkBroken(str(error)) from error
        if request.pool_id != self._pool_id:
            connection.send([_head(Verdict.POOL_REPLACED)])
            return False
        if request.what is What.PROBE:
            verdict, places = _probe(request.number)
        else:
            verdict, places = self._blocks(request)
        size_bytes = sum(place.nbytes for place in places)
        connection.send([_head(verdict, size_bytes), *places])
        return True

    def _blocks(self, request: BlockRequest) -> tuple[Verdict, Sequence[memoryview]]:
        readable = self._readable
        if readable is None:
            return Verdict.UNAVAILABLE, ()
        try:
            blocks = readable(request.transfer_id, request.first, request.number)
        except UnknownTransfer:
            return Verdict.UNKNOWN_TRANSFER, ()
        except BlockOutOfRange:
            return Verdict.OUT_OF_RANGE, ()
        except TimeoutError:
            return Verdict.UNAVAILABLE, ()
        size = self._part_block_bytes
        return Verdict.SENT, [part[block * size : (block + 1) * size] for block in blocks for part in self._parts]


def _probe(nbytes: int) -> tuple[Verdict, Sequence[memoryview]]:
    if nbytes > MAX_PROBE_BYTES:
        return Verdict.OUT_OF_RANGE, ()
    whole, rest = divmod(nbytes, PROBE_PIECE.nbytes)
    return Verdict.SENT, [*[PROBE_PIECE] * whole, *([PROBE_PIECE[:rest]] if rest else [])]


def _head(verdict: Verdict, size_bytes: int = 0) -> memoryview:
    return memoryview(write_head(Head(verdict, size_bytes)))
