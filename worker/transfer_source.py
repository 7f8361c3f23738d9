"""The source side of KV transfers on the wire: who may read which blocks, and how far they are. Protobuf stops here.

What state a transfer is in, `kvtransfer.source` decides; this file waits, answers and reads memory. A transfer is a
prompt that was announced, pinned until its reader is done; or blocks of the cache that a reader asked for by hash,
which are watched but not held, so that no reader ever takes room from the engine.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Protocol

import grpc
import torch

from engine.engine_thread import EngineStopped
from engine.pages import Watch
from engine.sequence import FirstToken
from kvtransfer.description import PoolDescription, check_compatible
from kvtransfer.errors import PairingRefused
from kvtransfer.source import OpenVerdict, SourceState, SourceTable
from protos import kv_transfer_pb2, kv_transfer_pb2_grpc
from service.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from worker.transfer_wire import description_to_wire, first_token_to_wire

SWEEP_PERIOD_S = 0.25
MESSAGE_BYTES = 1 << 20
MAX_PROBE_BYTES = 64 << 20
TRANSFER_ID_BYTES = 16
STOPPING_RETRY_S = 0.5
Owner = int | Watch
"""What a transfer keeps: the request whose pages are pinned, or the watch on blocks of the cache."""


class WatchedCache(Protocol):
    """The engine's prefix cache as an event loop reaches it."""

    def watch(self, hashes: Sequence[bytes]) -> "Future[Watch]":
        """See `BlockPool.watch`. Raises, at once or by the future: EngineStopped."""

    def unwatch(self, watch: Watch) -> None: ...


class TransferSource(kv_transfer_pb2_grpc.KvTransferServiceServicer):
    """Serves KvTransferService over the pool in `storage` (uint8, [blocks * block_bytes]).

    `on_ended` is told the request whose pages nobody will read any more; a worker that announces none needs none.
    Lives on the event loop.
    """

    def __init__(
        self,
        table: SourceTable[Owner, FirstToken],
        description: PoolDescription,
        storage: torch.Tensor,
        on_ended: Callable[[int], None] | None = None,
    ) -> None:
        self._table = table
        self._description = description
        self._storage = storage
        self._on_ended = on_ended
        self._changes: dict[bytes, asyncio.Event] = {}  # of transfers that somebody has open
        self._cache: WatchedCache | None = None
        self._closed = False

    def attach(self, cache: WatchedCache) -> None:
        """From now on blocks may be asked for by hash: the engine has loaded."""
        self._cache = cache

    def announce(self, transfer_id: bytes, request_id: int) -> bool:
        """A prompt has arrived. False if its reader has given up already."""
        announced = self._table.announce(transfer_id, request_id, time.monotonic())
        self._wake(transfer_id)
        return announced

    def advance(self, transfer_id: bytes, blocks: Sequence[int], first: Sequence[FirstToken] | None) -> None:
        """Blocks have become readable; with `first`, they were the last. Raises: UnknownTransfer."""
        now = time.monotonic()
        self._table.advance(transfer_id, blocks, now)
        if first is not None:
            self._table.finish(transfer_id, first, now)
        self._wake(transfer_id)

    def drop(self, transfer_id: bytes) -> None:
        """The prompt is gone: whoever reads it must not use what it has."""
        self._table.drop(transfer_id, time.monotonic())
        self._wake(transfer_id)

    def close(self) -> None:
        """The worker stops: whoever still follows a transfer is told that it is gone."""
        self._closed = True
        for changed in self._changes.values():
            changed.set()

    async def sweep(self) -> None:
        """Ends what has waited too long, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            for owner in self._table.expired(time.monotonic()):
                self._release(owner)
            for changed in self._changes.values():
                changed.set()  # a parked reader whose time is up finds out

    async def Pair(
        self,
        request: kv_transfer_pb2.PairRequest,
        context: "grpc.aio.ServicerContext[kv_transfer_pb2.PairRequest, kv_transfer_pb2.PairResponse]",
    ) -> kv_transfer_pb2.PairResponse:
        asked = request.reader
        reader = PoolDescription(asked.fingerprint, asked.block_bytes, asked.num_blocks, asked.host_id, asked.pool_id)
        try:
            check_compatible(self._description, reader)
        except PairingRefused as refused:
            raise FailedPrecondition(f"reader.{refused.field}", str(refused)) from refused
        return kv_transfer_pb2.PairResponse(source=description_to_wire(self._description))

    async def Open(
        self,
        request: kv_transfer_pb2.OpenRequest,
        context: "grpc.aio.ServicerContext[kv_transfer_pb2.OpenRequest, kv_transfer_pb2.OpenResponse]",
    ) -> AsyncIterator[kv_transfer_pb2.OpenResponse]:
        """Streams watermarks until the transfer has ended; NOT_FOUND if that was before its last watermark.

        With `block_hashes` one watermark says how many of them are here.
        """
        transfer_id = request.transfer_id
        if len(transfer_id) != TRANSFER_ID_BYTES:
            raise InvalidArgument("transfer_id", f"must be {TRANSFER_ID_BYTES} bytes")
        if request.pool_id != self._description.pool_id:
            raise FailedPrecondition("pool_id", "the pool that the reader paired with is gone")
        if self._closed:
            raise Unavailable("the worker is stopping", "STOPPING", STOPPING_RETRY_S)
        if request.block_hashes:
            await self._announce_cached(transfer_id, request.block_hashes)
        if self._table.open(transfer_id, time.monotonic()) is OpenVerdict.REFUSED:
            raise NotFound("transfer", "that id")  # the id is the right to read: it goes into no log
        changed = self._changes[transfer_id] = asyncio.Event()
        sent_blocks, finished = 0, False
        try:
            while not self._closed and not (state := self._table.snapshot(transfer_id)).dropped:
                changed.clear()
                if state.watermark_blocks > sent_blocks or (state.finished and not finished):
                    yield _watermark(state, sent_blocks)
                    sent_blocks, finished = state.watermark_blocks, state.finished
                await changed.wait()  # also after the last watermark: an open stream keeps the lease
        finally:
            del self._changes[transfer_id]
            self._table.reader_lost(transfer_id, time.monotonic())
        if not finished:
            raise NotFound("transfer", "that id")

    async def _announce_cached(self, transfer_id: bytes, hashes: Sequence[bytes]) -> None:
        """Makes a finished transfer of what the cache holds of `hashes`. Its lease runs until it is opened."""
        if self._cache is None:
            raise Unavailable("the engine is still loading", "LOADING", STOPPING_RETRY_S)
        if len(hashes) > self._description.num_blocks:
            raise InvalidArgument("block_hashes", f"at most {self._description.num_blocks}")
        try:
            asked = self._cache.watch(hashes)
            watch = await asyncio.wrap_future(asked)
        except EngineStopped as error:
            raise Unavailable("the worker is stopping", "STOPPING", STOPPING_RETRY_S) from error
        except asyncio.CancelledError:
            asked.add_done_callback(self._unwatch_result)
            raise
        now = time.monotonic()
        if not self._table.announce(transfer_id, watch, now):
            self._release(watch)
            raise NotFound("transfer", "that id")
        self._table.advance(transfer_id, watch.blocks, now)
        self._table.finish(transfer_id, (), now)

    def _unwatch_result(self, asked: "Future[Watch]") -> None:
        """The reader has gone while the engine was asked, which may have been too late to stop it."""
        if not asked.cancelled() and asked.exception() is None:
            self._release(asked.result())

    def _release(self, owner: Owner) -> None:
        if isinstance(owner, Watch):
            if self._cache is not None:
                self._cache.unwatch(owner)
        elif self._on_ended is not None:
            self._on_ended(owner)

    async def Read(
        self,
        request: kv_transfer_pb2.ReadRequest,
        context: "grpc.aio.ServicerContext[kv_transfer_pb2.ReadRequest, kv_transfer_pb2.ReadResponse]",
    ) -> AsyncIterator[kv_transfer_pb2.ReadResponse]:
        if request.WhichOneof("what") == "probe_bytes":
            if request.probe_bytes > MAX_PROBE_BYTES:
                raise InvalidArgument("probe_bytes", f"at most {MAX_PROBE_BYTES}")
            for size in _pieces(request.probe_bytes):
                yield kv_transfer_pb2.ReadResponse(data=bytes(size))
            return
        for block in self._readable(request.range):
            start = block * self._description.block_bytes
            for size in _pieces(self._description.block_bytes):
                piece = self._storage[start : start + size]
                yield kv_transfer_pb2.ReadResponse(data=piece.cpu().numpy().tobytes())
                start += size

    def _readable(self, asked: kv_transfer_pb2.TransferRange) -> tuple[int, ...]:
        state = self._table.snapshot(asked.transfer_id)
        if state.dropped:
            raise NotFound("transfer", "that id")
        end = asked.first_block + asked.num_blocks
        if end > len(state.blocks):
            raise InvalidArgument("range", f"ends at block {end}, the watermark is {len(state.blocks)}")
        return tuple(state.blocks[asked.first_block : end])

    async def Close(
        self,
        request: kv_transfer_pb2.CloseRequest,
        context: "grpc.aio.ServicerContext[kv_transfer_pb2.CloseRequest, kv_transfer_pb2.CloseResponse]",
    ) -> kv_transfer_pb2.CloseResponse:
        verdict = self._table.close(request.transfer_id, request.complete, time.monotonic())
        overwritten = isinstance(verdict.owner, Watch) and verdict.owner.broken
        if verdict.owner is not None:
            self._release(verdict.owner)
        self._wake(request.transfer_id)
        return kv_transfer_pb2.CloseResponse(valid=verdict.valid and not overwritten)

    def _wake(self, transfer_id: bytes) -> None:
        changed = self._changes.get(transfer_id)
        if changed is not None:
            changed.set()


def _watermark(state: SourceState[FirstToken], sent_blocks: int) -> kv_transfer_pb2.OpenResponse:
    blocks = state.blocks[sent_blocks:]
    if state.first_tokens is None:
        return kv_transfer_pb2.OpenResponse(watermark_blocks=len(state.blocks), blocks=blocks)
    first_tokens = [first_token_to_wire(first) for first in state.first_tokens]
    age_ms = 0.0 if state.finished_at is None else (time.monotonic() - state.finished_at) * 1e3
    end = kv_transfer_pb2.TransferEnd(first_tokens=first_tokens, age_ms=age_ms)
    return kv_transfer_pb2.OpenResponse(watermark_blocks=len(state.blocks), blocks=blocks, end=end)


def _pieces(size_bytes: int) -> Iterator[int]:
    while size_bytes > 0:
        yield min(size_bytes, MESSAGE_BYTES)
        size_bytes -= MESSAGE_BYTES
