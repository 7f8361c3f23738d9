"""Copies of KV blocks in virtual time, one block after another: a block that changes meanwhile is read changed."""

import asyncio
import random
from collections.abc import Sequence

import grpc
import numpy as np

from kvtransfer.checksum import BlockChecksum, Checksums
from kvtransfer.description import SharedMemoryHandle
from kvtransfer.errors import ChecksumDiffers, CopyBroken, PeerUnreachable
from kvtransfer.peer import PeerMemory
from kvtransfer.puller import CopyResult
from kvtransfer.transport import BlockPair, LinkRate, Transport
from protos import kv_transfer_pb2, kv_transfer_pb2_grpc
from service.grpc_options import INTERNAL_CHANNEL_OPTIONS
from simulation.model import KvNumbers
from worker.peers import READ_TIMEOUT_S


class SimulatedPullThread:
    """In place of the PullThread: one copy at a time, and a cancelled one ends before the caller continues."""

    def __init__(self, draw: random.Random, block_s: float, numbers: KvNumbers | None = None) -> None:
        """`numbers`: the pool that is copied into, where bits are to flip."""
        self._draw = draw
        self._block_s = block_s
        self._numbers = numbers
        self._turn = asyncio.Lock()
        self.flips = 0  # so many more copied blocks get a bit wrong; armed by a fault
        self.flipped = 0

    async def copy(self, transport: Transport, transfer_id: bytes, pairs: Sequence[BlockPair]) -> CopyResult:
        async with self._turn:
            copying = asyncio.ensure_future(self._copy(transport, transfer_id, pairs))
            try:
                return await asyncio.shield(copying)
            except asyncio.CancelledError:
                while not copying.done():
                    await _outlast(copying)
                if not copying.cancelled():
                    copying.exception()  # no caller awaits it
                raise

    async def check(self, checksums: Checksums, wanted: Sequence[BlockChecksum]) -> None:
        await asyncio.sleep(self._block_s)
        for block, value in wanted:
            if checksums.of(block) != value:
                raise ChecksumDiffers(f"block {block} has another checksum than its source had")

    async def measure(self, transport: Transport, nbytes: int) -> LinkRate:
        await asyncio.sleep(self._block_s)
        return LinkRate(nbytes, 0.001)

    def close(self) -> None:
        """There is no thread."""

    async def _copy(self, transport: Transport, transfer_id: bytes, pairs: Sequence[BlockPair]) -> CopyResult:
        copied, seconds = 0, 0.0
        for pair in pairs:
            block_s = self._block_s * (0.5 + self._draw.random())
            await asyncio.sleep(block_s)
            link = getattr(transport, "_link", None)
            if isinstance(link, SimulatedLink):
                await link.fetch(transfer_id, pair.logical)
            copied += transport.copy(transfer_id, [pair])
            if self.flips and self._numbers is not None:
                self.flips -= 1
                self.flipped += 1
                self._numbers[pair.destination, 0] ^= np.uint64(1 << self._draw.randrange(64))
            seconds += block_s
        return CopyResult(copied, seconds)


async def _outlast(copying: "asyncio.Future[CopyResult]") -> None:
    try:
        await asyncio.wait([copying])
    except asyncio.CancelledError:
        return


class SharedMemories:
    """The pools that may be mapped, by inode. A map outlives its owner, as a memfd does."""

    def __init__(self) -> None:
        self._pools: dict[int, KvNumbers] = {}

    def add(self, numbers: KvNumbers, size_bytes: int) -> SharedMemoryHandle:
        inode = len(self._pools) + 1
        self._pools[inode] = numbers
        return SharedMemoryHandle(pid=inode, fd=0, inode=inode, size_bytes=size_bytes)

    def open(self, handle: SharedMemoryHandle) -> PeerMemory:
        """In place of open_peer."""
        if handle.inode not in self._pools:
            raise PeerUnreachable("no such memory")
        return PeerMemory(self._pools[handle.inode].view("uint8").reshape(-1))


class SimulatedLink:
    """In place of the blocking channel of a peer: blocks are fetched before they are read, so that reading waits for
    nothing.
    """

    def __init__(self, endpoint: str, tls: object = None) -> None:
        self._channel = grpc.aio.insecure_channel(endpoint, INTERNAL_CHANNEL_OPTIONS)
        self.stub = kv_transfer_pb2_grpc.KvTransferServiceStub(self._channel)
        self._fetched: list[bytes] = []

    async def fetch(self, transfer_id: bytes, logical: int) -> None:
        """Raises: CopyBroken."""
        asked = kv_transfer_pb2.TransferRange(transfer_id=transfer_id, first_block=logical, num_blocks=1)
        request = kv_transfer_pb2.ReadRequest(range=asked)
        try:
            pieces = self.stub.Read(request, timeout=READ_TIMEOUT_S)
            self._fetched = [piece.data async for piece in pieces]
        except grpc.aio.AioRpcError as error:
            raise CopyBroken(f"reading failed: {error.code().name}") from error

    def read(self, transfer_id: bytes, first_block: int, num_blocks: int) -> Sequence[bytes]:
        """A `BlockLink`."""
        return self._fetched

    def close(self) -> None:
        """Calls that run are bounded by their timeout."""
