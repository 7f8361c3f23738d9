"""Reader's side of KV over TCP: requests blocks over one or several connections and receives them into the pool."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from time import monotonic

from baton.kvtransfer.slices import PoolShape, Storage, landing_places, parts_of
from baton.kvtransfer.tcp.connection import Connection
from baton.kvtransfer.tcp.messages import HEAD, ID_BYTES, REASONS, BlockRequest, Verdict, What, read_head, write_request
from baton.kvtransfer.transport import (
    BlockPair,
    CopyRefused,
    LinkBroken,
    LinkRate,
    PeerUnreachable,
    check_destinations,
    logical_runs,
)

MOST_CONNECTIONS = 4
WORTH = 1.25  # minimum speed-up at which a doubled number of connections is kept
SHARE_BYTES = 1 << 20  # minimum bytes of a copy per connection; with fewer, another connection costs more than it saves
WARM_UP_BYTES = 1 << 20
SCRATCH_BYTES = 1 << 20


class TcpTransport:
    """Transport over TCP. `pool`: this worker's pool, in host memory. The source's pool may have more or fewer parts.

    Copies use several connections if `measure` found several to be faster than one.
    """

    name = "tcp"

    def __init__(
        self, connect: Callable[[], Connection], pool_id: bytes, pool: Storage, source: PoolShape, own: PoolShape
    ) -> None:
        """Connect. Blocks. `pool_id`: id of the source's pool. Raises: PeerUnreachable."""
        self._connect = connect
        self._pool_id = pool_id
        self._own = own
        self._parts = [part.numpy().data for part in parts_of(pool, own)]
        self._places = landing_places(source, own)
        self._lock = threading.Lock()  # guards `_connections`, `_in_use` and `_closed`
        self._connections = [connect()]
        self._in_use = self._closed = False
        # The threads start during the first copy, so that they inherit the CPU cores of the copying thread.
        self._helpers = ThreadPoolExecutor(MOST_CONNECTIONS - 1, thread_name_prefix="kv-pull-more")

    def copy(self, transfer_id: bytes, pairs: Sequence[BlockPair]) -> int:
        """Copy blocks. Raises: BlockOutOfRange, before anything is requested; CopyRefused; LinkBroken."""
        check_destinations(pairs, self._own.num_blocks)
        size = len(pairs) * self._own.block_bytes
        with self._using() as connections:
            number = max(1, min(len(connections), len(pairs), size // SHARE_BYTES))
            cuts = [len(pairs) * cut // number for cut in range(number + 1)]
            shares = [pairs[start:end] for start, end in pairwise(cuts)]
            self._together(
                [
                    partial(self._fill, connection, transfer_id, share)
                    for connection, share in zip(connections, shares, strict=False)
                ]
            )
        return size

    def measure(self, nbytes: int) -> LinkRate:
        """Measure the link, and open further connections while they make it faster. Raises: LinkBroken, CopyRefused."""
        with self._using() as connections:
            self._probe(connections, WARM_UP_BYTES)
            best = self._probe(connections, nbytes)
            while 2 * len(connections) <= MOST_CONNECTIONS:
                before = len(connections)
                try:
                    connections.extend(self._connect() for _ in range(before))
                except PeerUnreachable:
                    break  # keep the open connections; copies use only these
                self._probe(connections, WARM_UP_BYTES)
                rate = self._probe(connections, nbytes)
                if rate.gb_per_s < WORTH * best.gb_per_s:
                    for connection in connections[before:]:
                        connection.close()
                    del connections[before:]
                    break
                best = rate
            return best

    def close(self) -> None:
        """Close without waiting: a running copy fails immediately. Any thread may call it, at any time."""
        with self._lock:
            self._closed = True
            for connection in self._connections:
                connection.abort()
            if not self._in_use:
                self._drop()

    @contextmanager
    def _using(self) -> Iterator[list[Connection]]:
        with self._lock:
            if self._closed:
                raise LinkBroken("the link to the peer was closed")
            self._in_use = True
        try:
            yield self._connections
        finally:
            with self._lock:
                self._in_use = False
                if self._closed:
                    self._drop()

    def _drop(self) -> None:
        for connection in self._connections:
            connection.close()
        self._helpers.shutdown(wait=False)

    def _together(self, work: Sequence[Callable[[], object]]) -> None:
        """Run all functions concurrently; return when all have finished. Raises: the exception of a failed function."""
        others = [self._helpers.submit(self._or_abort, each) for each in work[1:]]
        try:
            self._or_abort(work[0])
        finally:
            wait(others)
        for other in others:
            other.result()

    def _or_abort(self, work: Callable[[], object]) -> None:
        """Run `work`. If its connection breaks, abort all connections: without its blocks, the copy is incomplete."""
        try:
            work()
        except LinkBroken:
            for connection in list(self._connections):
                connection.abort()
            raise

    def _fill(self, connection: Connection, transfer_id: bytes, share: Sequence[BlockPair]) -> None:
        for run in logical_runs(share):
            request = BlockRequest(What.BLOCKS, self._pool_id, transfer_id, run[0].logical, len(run))
            _ask(connection, request, len(run) * self._own.block_bytes)
            connection.receive([place for pair in run for place in self._places_of(pair.destination)])

    def _places_of(self, block: int) -> Iterator[memoryview]:
        start = block * self._own.part_block_bytes
        for part, offset, width in self._places:
            yield self._parts[part][start + offset : start + offset + width]

    def _probe(self, connections: Sequence[Connection], nbytes: int) -> LinkRate:
        share = nbytes // len(connections)
        started = monotonic()
        self._together([partial(self._receive_probe, connection, share) for connection in connections])
        return LinkRate(share * len(connections), monotonic() - started)

    def _receive_probe(self, connection: Connection, nbytes: int) -> None:
        _ask(connection, BlockRequest(What.PROBE, self._pool_id, bytes(ID_BYTES), 0, nbytes), nbytes)
        scratch = memoryview(bytearray(min(nbytes, SCRATCH_BYTES)))
        for start in range(0, nbytes, SCRATCH_BYTES):
            connection.receive([scratch[: nbytes - start]])


def _ask(connection: Connection, request: BlockRequest, size_bytes: int) -> None:
    """Send a request for `size_bytes` bytes, which the caller then receives.

    Raises: CopyRefused if the peer will send no bytes; LinkBroken.
    """
    connection.send([memoryview(write_request(request))])
    try:
        head = read_head(connection.receive_bytes(HEAD.size))
    except ValueError as error:
        raise LinkBroken("the peer sent an invalid response header") from error
    if head.verdict is not Verdict.SENT:
        raise CopyRefused(f"the peer refused: {REASONS[head.verdict]}")
    if head.size_bytes != size_bytes:
        raise LinkBroken(f"the peer announced {head.size_bytes} bytes, expected {size_bytes}")
