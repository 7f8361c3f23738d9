"""Source side of KV transfers: the gRPC service over which readers learn which blocks they may read.

`kvtransfer/source.py` decides the state of a transfer; this file waits, answers and reads memory. There are two kinds
of transfers. Blocks of an announced prompt stay pinned until the reader has closed. Cached blocks that the reader
requests by hash are watched, not pinned, so that readers never reduce the blocks available to the engine.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from typing import Protocol

import grpc
from google.protobuf.message import Message

from baton.engine.kv_cache.block_pool import Watch
from baton.engine.request import FirstToken
from baton.engine.runner.thread import EngineStopped
from baton.kvtransfer.checksum import Checksums, SampledChecksums
from baton.kvtransfer.description import PoolDescription, check_compatible
from baton.kvtransfer.slices import Storage, parts_of
from baton.kvtransfer.source import OpenVerdict, SourceTable
from baton.kvtransfer.tcp.server import TcpServer
from baton.kvtransfer.transport import BlockOutOfRange, PairingRefused, UnknownTransfer
from baton.process.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from baton.process.wire_bounds import OutOfBounds
from baton.protos import kv_transfer_pb2, kv_transfer_pb2_grpc
from baton.worker.incoming.transfers import TRANSFER_ID_BYTES, TRANSFERS
from baton.worker.late_results import result_or_release
from baton.worker.transfer.process_groups import GroupHost
from baton.worker.transfer.tcp_links import looked_up_on
from baton.worker.transfer.wire import description_from_wire, description_to_wire, watermark_to_wire

logger = logging.getLogger(__name__)

Owner = int | Watch
"""Owner of a transfer's blocks: the id of the request that pins them, or the watch on cached blocks."""
SWEEP_PERIOD_S = 0.25
MESSAGE_BYTES = 1 << 20
MAX_PROBE_BYTES = 64 << 20
STOPPING_RETRY_S = 0.5
UNKNOWN = "the transfer is not known here: it has ended, or it was not announced"
"""Message without the transfer's id, which grants the right to read."""


class WatchedCache(Protocol):
    def watch(self, hashes: Sequence[bytes]) -> "Future[Watch]":
        """Watch cached blocks: see `BlockPool.watch`. Raises: EngineStopped, directly or through the future."""

    def unwatch(self, watch: Watch) -> None: ...

    def distrust(self, blocks: Sequence[int]) -> None:
        """Remove these blocks, and blocks computed from them, from the cache."""


PrepareCached = Callable[[Sequence[bytes], bool], Awaitable[None]]
"""Function of block names and a flag: checks cached blocks, after loading missing ones from files if the flag
is set.
"""


def is_overwritten(owner: Owner | None) -> bool:
    """Return whether blocks were reassigned while they were read; pinned blocks never are."""
    return isinstance(owner, Watch) and owner.broken


class TransferSource(kv_transfer_pb2_grpc.KvTransferServiceServicer):
    """Servicer of KvTransferService for the pool in `storage`. Lives on the event loop."""

    def __init__(
        self,
        table: SourceTable[Owner, FirstToken],
        description: PoolDescription,
        storage: Storage,
        cache: WatchedCache | None = None,
        on_ended: Callable[[int], None] | None = None,
        groups: GroupHost | None = None,
        on_slow_down: Callable[[str, float], None] = lambda gpu, slow_down: None,
        checksum_share: float = 0.0,
        tcp: TcpServer | None = None,
        prepare_cached: PrepareCached | None = None,
    ) -> None:
        """Create a source.

        `cache` None: readers cannot request blocks by hash; `prepare_cached` is awaited before cached blocks are
        offered. `on_ended` is called with the id of a request whose blocks have no reader any more. `on_slow_down` is
        called with a reader's GPU and the slow-down of its decode steps. `checksum_share`: share of blocks, in [0, 1],
        whose checksums are sent along, computed when the blocks become readable.
        """
        self._table = table
        self._description = description
        shape = description.shape
        self._parts = [part.view(shape.num_blocks, -1) for part in parts_of(storage, shape)]
        self._checksums = SampledChecksums(Checksums(storage, shape), checksum_share)
        self._on_ended = on_ended
        self._on_slow_down = on_slow_down
        self._groups = groups
        self._tcp = tcp
        self._changes: dict[bytes, asyncio.Event] = {}  # wakes the Open call of a transfer, by transfer id
        self._cache = cache
        self._prepare_cached = prepare_cached
        self._closed = False
        self.cached_reads = 0
        """Number of running reads of cached blocks."""
        if tcp is not None:
            tcp.attach(looked_up_on(asyncio.get_running_loop(), self._located))

    def announce(self, transfer_id: bytes, request_id: int) -> bool:
        """Announce the transfer of a prompt. Return False if its reader has given up already, or the id was used
        before.
        """
        announced = self._table.announce(transfer_id, request_id, time.monotonic())
        self._wake(transfer_id)
        return announced

    def advance(self, transfer_id: bytes, blocks: Sequence[int], first: Sequence[FirstToken] | None) -> None:
        """Make further blocks readable. `first`: the first tokens, for the call with the last blocks, else None.

        Raises: UnknownTransfer.
        """
        now = time.monotonic()
        self._table.advance(transfer_id, blocks, now, self._checksums.of(blocks))
        if first is not None:
            self._table.finish(transfer_id, first, now)
        self._wake(transfer_id)

    def drop(self, transfer_id: bytes) -> None:
        """Drop the transfer of a prompt: its reader must not use the blocks that it has read."""
        self._table.drop(transfer_id, time.monotonic())
        self._wake(transfer_id)

    def close(self) -> None:
        """End all transfers and notify their readers, because the worker stops."""
        self._closed = True
        if self._tcp is not None:
            self._tcp.detach()
        for changed in self._changes.values():
            changed.set()

    async def end_groups(self) -> None:
        """Close the process groups. Call it after `close`; it waits for the groups' timeout at most."""
        if self._groups is not None:
            await self._groups.close()

    async def sweep(self) -> None:
        """End transfers whose lease has expired, periodically until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            for owner in self._table.expired(time.monotonic()):
                self._release(owner)
            for changed in self._changes.values():
                changed.set()  # wakes waiting readers, whose leases may have expired

    async def Pair(
        self,
        request: kv_transfer_pb2.PairRequest,
        context: "grpc.aio.ServicerContext[kv_transfer_pb2.PairRequest, kv_transfer_pb2.PairResponse]",
    ) -> kv_transfer_pb2.PairResponse:
        _check(request)
        try:
            check_compatible(self._description, description_from_wire(request.reader))
        except PairingRefused as refused:
            raise FailedPrecondition(f"reader.{refused.field}", str(refused)) from refused
        return kv_transfer_pb2.PairResponse(source=description_to_wire(self._description))

    async def Open(
        self,
        request: kv_transfer_pb2.OpenRequest,
        context: "grpc.aio.ServicerContext[kv_transfer_pb2.OpenRequest, kv_transfer_pb2.OpenResponse]",
    ) -> AsyncIterator[kv_transfer_pb2.OpenResponse]:
        """Stream watermarks until the transfer has ended; NOT_FOUND if it ended before its last watermark.

        With `block_hashes`, a single watermark reports the cached blocks; with `restore`, missing ones are first loaded
        from files.
        """
        _check(request)
        transfer_id = request.transfer_id
        if not transfer_id:
            raise InvalidArgument("transfer_id", f"must be {TRANSFER_ID_BYTES} bytes")
        if request.pool_id != self._description.pool_id:
            raise FailedPrecondition("pool_id", "the pool that the reader paired with is gone")
        if self._closed:
            raise Unavailable("the worker is stopping", "STOPPING", STOPPING_RETRY_S)
        if request.block_hashes:
            await self._announce_cached(transfer_id, request.block_hashes, request.restore)
        if self._table.open(transfer_id, time.monotonic()) is OpenVerdict.REFUSED:
            raise NotFound("transfer", "", UNKNOWN)
        changed = self._changes[transfer_id] = asyncio.Event()
        sent_blocks, finished = 0, False
        try:
            while not self._closed and not (state := self._table.snapshot(transfer_id)).dropped:
                changed.clear()
                if state.watermark_blocks > sent_blocks or (state.finished and not finished):
                    yield watermark_to_wire(state, sent_blocks, time.monotonic())
                    sent_blocks, finished = state.watermark_blocks, state.finished
                await changed.wait()  # also after the last watermark: an open stream keeps blocks pinned
        finally:
            del self._changes[transfer_id]
            self._table.reader_lost(transfer_id, time.monotonic())
        if not finished:
            raise NotFound("transfer", "", UNKNOWN)

    async def _announce_cached(self, transfer_id: bytes, hashes: Sequence[bytes], restore: bool) -> None:
        """Create a finished transfer of the cached blocks of `hashes`; it expires unless a reader opens it soon."""
        if self._cache is None:
            raise FailedPrecondition("block_hashes", "this worker offers no cached blocks")
        if len(hashes) > self._num_blocks:
            raise InvalidArgument("block_hashes", f"must have at most {self._num_blocks} entries")
        if self._prepare_cached is not None:
            await self._prepare_cached(hashes, restore)
        try:
            watch = await result_or_release(self._cache.watch(hashes), self._cache.unwatch)
        except EngineStopped as error:
            raise Unavailable("the worker is stopping", "STOPPING", STOPPING_RETRY_S) from error
        now = time.monotonic()
        self.cached_reads += 1
        if not self._table.announce(transfer_id, watch, now):
            self._release(watch)
            raise NotFound("transfer", "", UNKNOWN)
        self._table.advance(transfer_id, watch.blocks, now, self._checksums.of(watch.blocks))
        self._table.finish(transfer_id, (), now)

    @property
    def _num_blocks(self) -> int:
        return self._description.num_blocks

    def _release(self, owner: Owner) -> None:
        if isinstance(owner, Watch):
            self.cached_reads -= 1
            if self._cache is not None:
                self._cache.unwatch(owner)
        elif self._on_ended is not None:
            self._on_ended(owner)

    async def Read(
        self,
        request: kv_transfer_pb2.ReadRequest,
        context: "grpc.aio.ServicerContext[kv_transfer_pb2.ReadRequest, kv_transfer_pb2.ReadResponse]",
    ) -> AsyncIterator[kv_transfer_pb2.ReadResponse]:
        _check(request)
        if request.WhichOneof("what") == "probe_bytes":
            if request.probe_bytes > MAX_PROBE_BYTES:
                raise InvalidArgument("probe_bytes", f"must be at most {MAX_PROBE_BYTES}")
            for size in _pieces(request.probe_bytes):
                yield kv_transfer_pb2.ReadResponse(data=bytes(size))
            return
        asked = request.range
        for block in self._readable(asked.transfer_id, range(asked.first_block, asked.first_block + asked.num_blocks)):
            for part in self._parts:  # each part has some of the block's heads
                for piece in part[block].split(MESSAGE_BYTES):
                    yield kv_transfer_pb2.ReadResponse(data=piece.cpu().numpy().tobytes())

    def _readable(self, transfer_id: bytes, wanted: Sequence[int]) -> list[int]:
        """Return the physical indices of a transfer's logical blocks `wanted`. Raises: NotFound, InvalidArgument."""
        try:
            return self._located(transfer_id, wanted)
        except UnknownTransfer as error:
            raise NotFound("transfer", "", UNKNOWN) from error
        except BlockOutOfRange as error:
            raise InvalidArgument("range", str(error)) from error

    def _located(self, transfer_id: bytes, wanted: Sequence[int]) -> list[int]:
        """Return the physical indices of a transfer's logical blocks `wanted`. Raises: UnknownTransfer,
        BlockOutOfRange.
        """
        state = self._table.snapshot(transfer_id)
        if state.dropped:
            raise UnknownTransfer(transfer_id)
        end = 1 + (wanted[-1] if isinstance(wanted, range) and wanted else max(wanted, default=-1))
        if end > len(state.blocks):
            raise BlockOutOfRange(f"block {end - 1} requested, only {len(state.blocks)} blocks are readable")
        return [state.blocks[logical] for logical in wanted]

    async def Join(
        self,
        request: kv_transfer_pb2.JoinRequest,
        context: "grpc.aio.ServicerContext[kv_transfer_pb2.JoinRequest, kv_transfer_pb2.JoinResponse]",
    ) -> AsyncIterator[kv_transfer_pb2.JoinResponse]:
        _check(request)
        responses = self._host.join(request)
        async with aclosing(responses):
            async for response in responses:
                yield response

    async def Store(
        self,
        request: kv_transfer_pb2.StoreRequest,
        context: "grpc.aio.ServicerContext[kv_transfer_pb2.StoreRequest, kv_transfer_pb2.StoreResponse]",
    ) -> kv_transfer_pb2.StoreResponse:
        _check(request)
        return await self._host.store(request)

    async def Send(
        self,
        request: kv_transfer_pb2.SendRequest,
        context: "grpc.aio.ServicerContext[kv_transfer_pb2.SendRequest, kv_transfer_pb2.SendResponse]",
    ) -> kv_transfer_pb2.SendResponse:
        _check(request)
        if request.WhichOneof("what") == "probe_messages":
            self._host.probe(request.group_id, request.first_sequence, request.probe_messages)
        else:
            blocks = self._readable(request.blocks.transfer_id, request.blocks.blocks)
            self._host.send(request.group_id, request.first_sequence, blocks)
        return kv_transfer_pb2.SendResponse()

    @property
    def _host(self) -> GroupHost:
        if self._groups is None:
            raise FailedPrecondition("backend", "this worker offers no process group")
        return self._groups

    async def Close(
        self,
        request: kv_transfer_pb2.CloseRequest,
        context: "grpc.aio.ServicerContext[kv_transfer_pb2.CloseRequest, kv_transfer_pb2.CloseResponse]",
    ) -> kv_transfer_pb2.CloseResponse:
        _check(request)
        if request.gpu and request.slow_down:
            self._on_slow_down(request.gpu, request.slow_down)
        blocks = self._table.snapshot(request.transfer_id).blocks
        verdict = self._table.close(request.transfer_id, request.complete, time.monotonic())
        overwritten = is_overwritten(verdict.owner)
        valid = verdict.valid and not overwritten
        if request.corrupt:
            valid = verdict.owner is not None and not overwritten  # else the blocks were stale, not corrupt
            if valid and self._cache is not None:
                logger.error("checksum mismatch reported by a reader: removing %d blocks from the cache", len(blocks))
                self._cache.distrust(blocks)
        if verdict.owner is not None:
            self._release(verdict.owner)
        self._wake(request.transfer_id)
        return kv_transfer_pb2.CloseResponse(valid=valid)

    async def Confirm(
        self,
        request: kv_transfer_pb2.ConfirmRequest,
        context: "grpc.aio.ServicerContext[kv_transfer_pb2.ConfirmRequest, kv_transfer_pb2.ConfirmResponse]",
    ) -> kv_transfer_pb2.ConfirmResponse:
        _check(request)
        verdict = self._table.confirm(request.transfer_id)
        return kv_transfer_pb2.ConfirmResponse(pinned=verdict.valid and not is_overwritten(verdict.owner))

    def _wake(self, transfer_id: bytes) -> None:
        changed = self._changes.get(transfer_id)
        if changed is not None:
            changed.set()


def _check(request: Message) -> None:
    """Check the bounds of a request. Raises: InvalidArgument."""
    try:
        TRANSFERS.check(request)
    except OutOfBounds as refusal:
        raise InvalidArgument("request", str(refusal)) from refusal


def _pieces(size_bytes: int) -> Iterator[int]:
    while size_bytes > 0:
        yield min(size_bytes, MESSAGE_BYTES)
        size_bytes -= MESSAGE_BYTES
