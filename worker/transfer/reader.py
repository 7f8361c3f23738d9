"""Reader side of KV transfers: pulls blocks of other workers into reserved blocks of this one.

Blocks of a prompt are pulled while the source computes it; cached blocks are pulled all together. A pull is complete
when the source has confirmed that the blocks did not change while they were read. Cancelling a pull waits for the
running copy, so that its blocks can be released.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, NoReturn, Protocol

import grpc

from baton.engine.request import FirstToken
from baton.kvtransfer.checksum import BlockChecksum
from baton.kvtransfer.transport import BlockPair, ChecksumDiffers
from baton.process.wire_bounds import OutOfBounds
from baton.protos import kv_transfer_pb2, kv_transfer_pb2_grpc
from baton.worker.incoming.transfers import TRANSFERS
from baton.worker.transfer.peers import Peer, PeerFailed, PeerLink, Peers
from baton.worker.transfer.wire import first_token_from_wire

logger = logging.getLogger(__name__)

CONFIRM_TIMEOUT_S = 2.0
CLOSE_TIMEOUT_S = 2.0
CONFIRM_PERIOD_S = 0.1
TAKEN_BACK = frozenset(
    {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT}
)
"""Statuses from a source that is still running."""


class TransferFailed(Exception):
    """Error: the KV could not be read, or the read blocks must not be used."""


class BlocksCorrupt(TransferFailed):
    """Error: a checksum differs from the source's. The source has been notified."""


class PoolReplaced(TransferFailed):
    """Error: another process now has the peer's address; the pool mapped here belongs to the earlier process."""


class SourceLost(TransferFailed):
    """Error: the source does not respond any more. Blocks that it confirmed may be kept."""


class Destination(Protocol):
    """Reserved blocks of this worker that receive a transfer."""

    @property
    def blocks(self) -> Sequence[int]:
        """Blocks in logical order. Only the pull writes them; they are read after it has finished."""

    @property
    def cached_blocks(self) -> int:
        """Number of leading blocks that have their KV already and are not pulled."""


@dataclass(frozen=True, slots=True)
class Pull:
    """Result of a pull whose blocks were validated."""

    first_tokens: tuple[FirstToken, ...]  # empty for blocks that were requested by hash
    blocks: int  # number of leading blocks of the destination that have KV now
    bytes: int
    copy_ms: float
    exposed_ms: float  # time from the first token's sampling, or the Open call if later, to the validation
    late_ms: float  # time from the first token's sampling to the Open call, if the request waited for blocks
    transport: str


@dataclass(slots=True)
class ConfirmedBlocks:
    """Number of leading blocks of a failed pull that may still be used.

    A copied block is confirmed once the source reports that the block was pinned during the copy. It stays valid if
    the source is lost later, so another attempt at the same prompt need not pull it again.
    """

    blocks: int = 0


@dataclass(slots=True)
class Progress:
    """Progress of one pull: blocks offered and copied so far."""

    opened: float  # time of the Open call, monotonic seconds

    source_blocks: list[int] = field(default_factory=list)  # physical blocks in logical order
    landed_blocks: int = 0  # number of blocks that were copied and whose checksums, if sent, match
    copied_bytes: int = 0
    copy_s: float = 0.0
    last_watermark: float = 0.0  # arrival of the last watermark, monotonic seconds
    round_trip_s: float = 0.0  # duration of the call that confirmed the copy
    last_age_s: float = 0.0  # age of the first token when the last watermark was sent

    def timings_ms(self, validated: float) -> tuple[float, float]:
        """Return (exposed_ms, late_ms): see `Pull`. Time before the Open call does not count as transfer.

        The travel time of the last watermark involves two clocks and cannot be measured: half of a round trip is
        assumed.
        """
        late_s = max(0.0, self.last_age_s - (self.last_watermark - self.opened))
        exposed_s = validated - self.last_watermark + self.last_age_s - late_s + self.round_trip_s / 2
        return exposed_s * 1e3, late_s * 1e3


async def keep_confirming(
    stub: kv_transfer_pb2_grpc.KvTransferServiceStub,
    transfer_id: bytes,
    progress: Progress,
    confirmed: ConfirmedBlocks,
    period_s: float,
) -> None:
    """Ask the source every `period_s` to confirm copied blocks, until cancelled or until a request fails or is denied.

    A short pull needs no such request, because the Close call confirms all its blocks. Copies continue during a
    request; the next request confirms the blocks that they add.
    """
    request = kv_transfer_pb2.ConfirmRequest(transfer_id=transfer_id)
    while True:
        await asyncio.sleep(period_s)
        landed_blocks = progress.landed_blocks
        if landed_blocks <= confirmed.blocks:
            continue
        try:
            response = await stub.Confirm(request, timeout=CONFIRM_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return  # the pull fails with the same error
        if response is None or not response.pinned:  # None: gRPC could not parse it
            return
        confirmed.blocks = landed_blocks


@dataclass(slots=True)
class Integrity:
    """Counts of checksum comparisons since the start."""

    checked_blocks: int = 0
    checksum_mismatches: int = 0  # blocks that differed


class Outcome(Enum):
    """Outcome of a pull; it decides whether the source must still be notified."""

    GIVEN_UP = auto()  # the source still waits for a reader
    PINNED = auto()  # the blocks were pinned throughout, and the source has released them
    STALE = auto()  # the source reused blocks during the read
    REPLACED = auto()  # another process has the source's address


class Arrival(NamedTuple):
    message: kv_transfer_pb2.OpenResponse
    at: float  # arrival time, monotonic seconds


class TransferReader:
    """Puller of KV blocks from other workers into this worker's pool."""

    def __init__(
        self,
        peers: Peers,
        gpu: str = "",
        slow_down: Callable[[], float] = lambda: 0.0,
        confirm_period_s: float | None = None,
    ) -> None:
        """Create a reader. `gpu`: UUID of the decoding GPU; `slow_down`: see SlowDown.ratio. Sources receive both."""
        self._peers, self._gpu, self._slow_down = peers, gpu, slow_down
        self._confirm_period_s = confirm_period_s or CONFIRM_PERIOD_S
        self._closing: set[asyncio.Task[None]] = set()
        self.integrity = Integrity()

    @property
    def links(self) -> tuple[PeerLink, ...]:
        return self._peers.links

    async def pull(
        self,
        endpoint: str,
        transfer_id: bytes,
        destination: Destination,
        block_hashes: Sequence[bytes] = (),
        confirmed: ConfirmedBlocks | None = None,
        restore: bool = False,
    ) -> Pull:
        """Copy the blocks that `destination` lacks. Raises: TransferFailed.

        With `block_hashes`, one per block of the destination: copy the longest prefix of these blocks that the source
        has cached, possibly none. `restore`: the source first loads missing blocks from files.

        Without `block_hashes`: copy all blocks of a prompt that the source computes. If the source is lost or the
        call is cancelled, `confirmed` has the number of leading blocks that may be kept.
        """
        request = kv_transfer_pb2.OpenRequest(transfer_id=transfer_id, block_hashes=block_hashes, restore=restore)
        try:
            try:
                return await self._pull_once(endpoint, request, destination, confirmed)
            except PoolReplaced:
                _doubt(confirmed)  # the next attempt overwrites the confirmed blocks
                return await self._pull_once(endpoint, request, destination, confirmed)
        except SourceLost:
            raise
        except TransferFailed:
            _doubt(confirmed)  # the source may have released the confirmed blocks
            raise
        except OutOfBounds as refusal:
            _doubt(confirmed)
            raise TransferFailed(f"invalid message from {endpoint}: {refusal}") from refusal
        except Exception as fault:  # foreign messages: any error ends only this transfer
            logger.exception("transfer failed unexpectedly: %s", endpoint)
            _doubt(confirmed)
            raise TransferFailed(f"transfer from {endpoint} failed: {type(fault).__name__}: {fault}") from fault

    async def _pull_once(
        self,
        endpoint: str,
        request: kv_transfer_pb2.OpenRequest,
        destination: Destination,
        confirmed: ConfirmedBlocks | None,
    ) -> Pull:
        try:
            peer = await self._peers.borrow(endpoint)
        except PeerFailed as error:
            raise TransferFailed(str(error)) from error
        progress = Progress(opened=time.monotonic())
        request.pool_id = peer.pool_id
        outcome = Outcome.GIVEN_UP
        try:
            async with self._opened(peer, request, progress, confirmed) as stream:
                end = await self._follow(peer, stream, request.transfer_id, destination, progress)
                if not request.block_hashes and len(progress.source_blocks) != len(destination.blocks):
                    raise TransferFailed("the source ended the transfer before the prompt was complete")
                asked = time.monotonic()
                outcome = Outcome.PINNED if await self._confirm(peer, request.transfer_id) else Outcome.STALE
                progress.round_trip_s = time.monotonic() - asked
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                outcome = Outcome.REPLACED
            self._raise_failure(peer, error)
        except PeerFailed as error:
            raise SourceLost(str(error)) from error
        finally:
            if outcome in (Outcome.PINNED, Outcome.REPLACED):
                self._peers.give_back(peer)
            else:
                self._give_up(peer, request.transfer_id)
        if outcome is Outcome.STALE:
            raise TransferFailed(f"the source {endpoint} reused blocks during the read")
        exposed_ms, late_ms = progress.timings_ms(time.monotonic())
        return Pull(
            tuple(first_token_from_wire(first) for first in end.first_tokens),
            len(progress.source_blocks),
            progress.copied_bytes,
            progress.copy_s * 1e3,
            exposed_ms,
            late_ms,
            peer.transport.name,
        )

    @asynccontextmanager
    async def _opened(
        self,
        peer: Peer,
        request: kv_transfer_pb2.OpenRequest,
        progress: Progress,
        confirmed: ConfirmedBlocks | None,
    ) -> AsyncIterator[AsyncIterator[kv_transfer_pb2.OpenResponse]]:
        """Open the stream of watermarks. While it is open, record in `confirmed`, if given, how many blocks the source
        confirms.
        """
        stream = peer.stub.Open(request)
        confirming: asyncio.Task[None] | None = None
        if confirmed is not None:
            asking = keep_confirming(peer.stub, request.transfer_id, progress, confirmed, self._confirm_period_s)
            confirming = asyncio.create_task(asking, name="confirm")
        try:
            yield stream
        finally:
            if confirming is not None:
                confirming.cancel()
            stream.cancel()

    def _raise_failure(self, peer: Peer, error: grpc.aio.AioRpcError) -> NoReturn:
        """Raise the error for a gRPC status from the source. Forget the peer if its process is gone."""
        code = error.code()
        if code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAVAILABLE):
            self._peers.forget(peer)
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            raise PoolReplaced(f"another process now listens at {peer.endpoint}") from error
        kind = TransferFailed if code in TAKEN_BACK else SourceLost
        raise kind(f"transfer from {peer.endpoint} failed: {code.name} {error.details()}") from error

    async def close(self) -> None:
        """Wait until the sources are notified of cancelled pulls; for CLOSE_TIMEOUT_S at most."""
        await asyncio.gather(*self._closing)

    async def _follow(
        self,
        peer: Peer,
        stream: AsyncIterator[kv_transfer_pb2.OpenResponse],
        transfer_id: bytes,
        destination: Destination,
        progress: Progress,
    ) -> kv_transfer_pb2.TransferEnd:
        """Copy blocks as the source completes them. Return the field `end` of the last watermark once all blocks have
        been copied.
        """
        arrivals: asyncio.Queue[Arrival | None] = asyncio.Queue()
        # Messages are read ahead of the copies: the arrival time must not include the wait for a copy.
        reading = asyncio.create_task(_read(stream, arrivals))
        try:
            while (arrival := await arrivals.get()) is not None:
                await self._copy_new(peer, transfer_id, destination, progress, arrival.message)
                if arrival.message.HasField("end"):
                    progress.last_watermark, progress.last_age_s = arrival.at, arrival.message.end.age_ms / 1e3
                    return arrival.message.end
            await reading  # raises the error of the stream
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        raise TransferFailed("the source closed before its last watermark")

    async def _copy_new(
        self,
        peer: Peer,
        transfer_id: bytes,
        destination: Destination,
        progress: Progress,
        message: kv_transfer_pb2.OpenResponse,
    ) -> None:
        TRANSFERS.check(message)
        first_new = max(len(progress.source_blocks), destination.cached_blocks)
        progress.source_blocks.extend(message.blocks)
        if len(progress.source_blocks) > len(destination.blocks):
            raise TransferFailed("the source offered more blocks than requested")
        pairs = [
            BlockPair(index, progress.source_blocks[index], destination.blocks[index])
            for index in range(first_new, len(progress.source_blocks))
        ]
        if pairs:
            copied = await self._peers.copy(peer, transfer_id, pairs)
            progress.copied_bytes += copied.bytes
            progress.copy_s += copied.seconds
        wanted = [
            BlockChecksum(destination.blocks[checksum.block], checksum.value)
            for checksum in message.checksums
            if first_new <= checksum.block < len(progress.source_blocks)
        ]
        await self._check(peer, transfer_id, pairs, wanted)
        progress.landed_blocks = len(progress.source_blocks)

    async def _check(
        self, peer: Peer, transfer_id: bytes, pairs: Sequence[BlockPair], wanted: Sequence[BlockChecksum]
    ) -> None:
        """Compare copied blocks with the source's checksums; see `Peers.check`.

        Raises: BlocksCorrupt after notifying the source; TransferFailed if the source has released the blocks;
        AioRpcError; PeerFailed.
        """
        self.integrity.checked_blocks += len(wanted)
        try:
            await self._peers.check(peer, transfer_id, pairs, wanted)
        except ChecksumDiffers as error:
            request = kv_transfer_pb2.CloseRequest(transfer_id=transfer_id, corrupt=True)
            kept = await _closed(peer, request)
            if not kept:
                raise TransferFailed(f"the source {peer.endpoint} reused blocks during the read") from error
            self.integrity.checksum_mismatches += 1
            self._peers.distrust(peer)
            logger.error("KV read from %s is corrupt: %s; the blocks are not used", peer.endpoint, error)
            raise BlocksCorrupt(f"the KV read from {peer.endpoint} is corrupt: {error}") from error

    async def _confirm(self, peer: Peer, transfer_id: bytes) -> bool:
        """Confirm a complete read, which unpins the blocks; return whether they were pinned throughout."""
        request = kv_transfer_pb2.CloseRequest(
            transfer_id=transfer_id, complete=True, gpu=self._gpu, slow_down=self._slow_down()
        )
        return await _closed(peer, request)

    def _give_up(self, peer: Peer, transfer_id: bytes) -> None:
        """Notify the source, without waiting, that there is no reader any more. If that fails, the source keeps the
        blocks until the lease expires.
        """

        async def close() -> None:
            request = kv_transfer_pb2.CloseRequest(transfer_id=transfer_id, complete=False)
            try:
                await peer.stub.Close(request, timeout=CLOSE_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                logger.info(
                    "could not cancel the transfer at %s: %s; its blocks stay pinned there until the lease expires",
                    peer.endpoint,
                    error.code().name,
                )
            finally:
                self._peers.give_back(peer)

        task = asyncio.get_running_loop().create_task(close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def _closed(peer: Peer, request: kv_transfer_pb2.CloseRequest) -> bool:
    """Close the transfer; return whether the blocks read were pinned throughout. Raises: AioRpcError, OutOfBounds."""
    response = await peer.stub.Close(request, timeout=CLOSE_TIMEOUT_S)
    TRANSFERS.check(response)
    return bool(response.valid)


def _doubt(confirmed: ConfirmedBlocks | None) -> None:
    if confirmed is not None:
        confirmed.blocks = 0


async def _read(stream: AsyncIterator[kv_transfer_pb2.OpenResponse], arrivals: "asyncio.Queue[Arrival | None]") -> None:
    """Put each message with its arrival time into `arrivals`, and None after the last message."""
    try:
        async for message in stream:
            arrivals.put_nowait(Arrival(message, time.monotonic()))
    finally:
        arrivals.put_nowait(None)
