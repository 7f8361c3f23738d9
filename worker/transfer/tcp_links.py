"""KV over TCP where two workers meet: the port of a source's pool, and a reader's connections to it.

Its threads know no event loop. A transfer's blocks are looked up on the loop, which alone knows what may be read.
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

LOOK_UP_TIMEOUT_S = 2.0


def secure_accepted(tls: InternalTls | None) -> Secure | None:
    """Mutual TLS where our processes have it. Raises: TlsError."""
    return None if tls is None else tls.streams().accepted


def looked_up_on(loop: asyncio.AbstractEventLoop, find: Callable[[bytes, range], Sequence[int]]) -> Readable:
    """Return a function that calls `find` on the loop, from any thread. It raises as `Readable` does."""

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
            raise TimeoutError("the event loop has ended") from error
        return asked.result(LOOK_UP_TIMEOUT_S)

    return ask


async def connect_tcp(
    endpoint: str, source: PoolDescription, storage: Storage, own: PoolShape, tls: InternalTls | None
) -> TcpTransport:
    """Blocks of `source`, at `endpoint` (host:port of its gRPC), will land in `storage`. Raises: PeerUnreachable.

    When cancelled, connections that come about all the same are closed.
    """
    try:
        secure = None if tls is None else tls.streams().connected
    except TlsError as error:
        raise PeerUnreachable(str(error)) from error
    host = endpoint.rpartition(":")[0].strip("[]")
    open_one = partial(connect, host, source.tcp_port, secure, PIECE_TIMEOUT_S)
    opening = asyncio.ensure_future(
        asyncio.to_thread(TcpTransport, open_one, source.pool_id, storage, source.shape, own)
    )
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_drop)
        raise


def _drop(opening: "asyncio.Future[TcpTransport]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
