"""Pairing of two workers for KV over TCP: the port of a source's pool and a reader's connections to it.

Threads of the TCP server look up a transfer's blocks on the event loop, which alone knows what may be read.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from baton.kvtransfer.description import PoolDescription
from baton.kvtransfer.slices import PoolShape, Storage
from baton.kvtransfer.tcp.connection import PIECE_TIMEOUT_S, Secure, connect
from baton.kvtransfer.tcp.reader import TcpTransport
from baton.kvtransfer.tcp.server import Readable
from baton.kvtransfer.transport import PeerUnreachable, TransferError
from baton.process.security.tls import InternalTls, TlsError
from baton.worker.late_results import run_on_thread

LOOK_UP_TIMEOUT_S = 2.0


def secure_accepted(tls: InternalTls | None) -> Secure | None:
    """Return the function that wraps accepted connections in TLS; None without internal TLS. Raises: TlsError."""
    return None if tls is None else tls.streams().accepted


def looked_up_on(loop: asyncio.AbstractEventLoop, find: Callable[[bytes, range], Sequence[int]]) -> Readable:
    """Return a function that calls `find` on the event loop from any thread. It raises the errors of `Readable`."""

    def answer(asked: "Future[Sequence[int]]", transfer_id: bytes, wanted: range) -> None:
        try:
            asked.set_result(find(transfer_id, wanted))
        except TransferError as error:
            asked.set_exception(error)

    def ask(transfer_id: bytes, first: int, count: int) -> Sequence[int]:
        asked: Future[Sequence[int]] = Future()
        try:
            loop.call_soon_threadsafe(answer, asked, transfer_id, range(first, first + count))
        except RuntimeError as error:
            raise TimeoutError("the event loop has stopped") from error
        return asked.result(LOOK_UP_TIMEOUT_S)

    return ask


async def connect_tcp(
    endpoint: str, source: PoolDescription, storage: Storage, own: PoolShape, tls: InternalTls | None
) -> TcpTransport:
    """Connect to `source`, whose gRPC port is at `endpoint`, for copies into `storage`. Raises: PeerUnreachable.

    If this is cancelled, connections that are opened afterwards are closed.
    """
    try:
        secure = None if tls is None else tls.streams().connected
    except TlsError as error:
        raise PeerUnreachable(str(error)) from error
    host = endpoint.rpartition(":")[0].strip("[]")
    open_one = partial(connect, host, source.tcp_port, secure, PIECE_TIMEOUT_S)
    make = partial(TcpTransport, open_one, source.pool_id, storage, source.shape, own)
    return await run_on_thread(make, TcpTransport.close)
