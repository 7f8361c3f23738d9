"""The workers that this one reads KV from: pairs once with each, and keeps the fastest way to it."""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Literal

import grpc
import torch

from kvtransfer.description import PoolDescription, can_map, check_compatible
from kvtransfer.errors import CopyBroken, PeerUnreachable, TransferError
from kvtransfer.peer import open_peer
from kvtransfer.puller import CopyResult, PullThread
from kvtransfer.shared_memory import SharedMemoryTransport
from kvtransfer.stream import StreamTransport
from kvtransfer.transport import BlockPair, LinkRate, Transport
from protos import kv_transfer_pb2, kv_transfer_pb2_grpc
from service.grpc_options import INTERNAL_CHANNEL_OPTIONS
from worker.transfer_wire import description_from_wire

logger = logging.getLogger(__name__)
TransportChoice = Literal["auto", "shared_memory", "grpc"]
PROBE_BYTES = 8 << 20
READ_TIMEOUT_S = 10.0


class PeerFailed(Exception):
    """The other worker cannot be paired with, or blocks cannot be copied from it."""


@dataclass(eq=False, slots=True)
class Peer:
    """Another worker, paired with. Its links are closed once it was forgotten and nobody uses it any more."""

    endpoint: str
    stub: kv_transfer_pb2_grpc.KvTransferServiceStub
    pool_id: bytes  # of the process that we paired with; its address may be another's by now
    channel: grpc.aio.Channel
    link: "GrpcLink"
    transport: Transport
    rate: LinkRate
    users: int = 0
    forgotten: bool = False


class GrpcLink:
    """Bytes of blocks by KvTransfer.Read, blocking: the pull thread has no event loop."""

    def __init__(self, endpoint: str) -> None:
        self._channel = grpc.insecure_channel(endpoint, INTERNAL_CHANNEL_OPTIONS)
        self._stub = kv_transfer_pb2_grpc.KvTransferServiceStub(self._channel)

    def read(self, transfer_id: bytes, first_block: int, num_blocks: int) -> Iterator[bytes]:
        asked = kv_transfer_pb2.TransferRange(transfer_id=transfer_id, first_block=first_block, num_blocks=num_blocks)
        yield from self._pieces(kv_transfer_pb2.ReadRequest(range=asked))

    def probe(self, size_bytes: int) -> Iterator[bytes]:
        yield from self._pieces(kv_transfer_pb2.ReadRequest(probe_bytes=size_bytes))

    def _pieces(self, request: kv_transfer_pb2.ReadRequest) -> Iterator[bytes]:
        try:
            for response in self._stub.Read(request, timeout=READ_TIMEOUT_S):
                yield response.data
        except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed
            raise CopyBroken(f"reading broke off: {error}") from error

    def close(self) -> None:
        self._channel.close()


class Peers:
    """Copies from any peer into `storage` (uint8, [blocks * block_bytes]), which `mine` describes."""

    def __init__(
        self,
        mine: PoolDescription,
        storage: torch.Tensor,
        thread: PullThread,
        choice: TransportChoice,
        pair_timeout_s: float,
    ) -> None:
        self._mine = mine
        self._storage = storage
        self._thread = thread
        self._choice = choice
        self._pair_timeout_s = pair_timeout_s
        self._pairings: dict[str, asyncio.Task[Peer]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    async def borrow(self, endpoint: str) -> Peer:
        """The peer at `endpoint`, paired with at the first call; to be given back once. Raises: PeerFailed."""
        while not self._closed:
            pairing = self._pairings.get(endpoint)
            if pairing is None:
                pairing = self._pairings[endpoint] = asyncio.create_task(self._pair(endpoint))
                pairing.add_done_callback(partial(self._on_paired, endpoint))
            peer = await asyncio.shield(pairing)
            if not peer.forgotten:
                peer.users += 1
                return peer
        raise PeerFailed("this worker is stopping")

    def give_back(self, peer: Peer) -> None:
        peer.users -= 1
        self._close_if_unused(peer)

    def forget(self, peer: Peer) -> None:
        """This peer has gone; whoever comes to its address next is paired with anew."""
        if peer.forgotten:
            return
        peer.forgotten = True
        del self._pairings[peer.endpoint]
        self._close_if_unused(peer)

    async def copy(self, peer: Peer, transfer_id: bytes, pairs: Sequence[BlockPair]) -> CopyResult:
        """Raises: PeerFailed. When cancelled, ends only after the copy has."""
        try:
            return await self._thread.copy(peer.transport, transfer_id, pairs)
        except TransferError as error:
            raise PeerFailed(f"copying failed: {error}") from error

    async def close(self) -> None:
        """Ends whatever still runs over a link."""
        self._closed = True
        for pairing in self._pairings.values():
            pairing.cancel()
        pairings = await asyncio.gather(*self._pairings.values(), return_exceptions=True)
        await asyncio.gather(*(_close(peer) for peer in pairings if isinstance(peer, Peer)), *self._closing)
        await asyncio.to_thread(self._thread.close)  # waits for the copy under way, whose link has just been closed

    def _on_paired(self, endpoint: str, pairing: "asyncio.Task[Peer]") -> None:
        """One that failed is not kept: the next request tries again."""
        if pairing.cancelled() or pairing.exception() is not None:
            del self._pairings[endpoint]

    def _close_if_unused(self, peer: Peer) -> None:
        if peer.forgotten and peer.users == 0:
            task = asyncio.create_task(_close(peer))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _pair(self, endpoint: str) -> Peer:
        """Raises: PeerFailed. Whatever goes wrong, nothing of the peer stays open."""
        try:
            async with AsyncExitStack() as undo:
                channel = grpc.aio.insecure_channel(endpoint, INTERNAL_CHANNEL_OPTIONS)
                undo.push_async_callback(channel.close)
                link = GrpcLink(endpoint)
                undo.callback(link.close)
                stub = kv_transfer_pb2_grpc.KvTransferServiceStub(channel)
                source = await self._describe(stub)
                check_compatible(self._mine, source)
                transport = self._choose(endpoint, source, link)
                undo.callback(transport.close)
                rate = await self._thread.measure(transport, PROBE_BYTES)
                undo.pop_all()
        except grpc.aio.AioRpcError as error:
            raise PeerFailed(f"pairing with {endpoint} failed: {error.code().name} {error.details()}") from error
        except TransferError as error:
            raise PeerFailed(f"pairing with {endpoint} failed: {error}") from error
        logger.info("paired with %s over %s: %.2f GB/s", endpoint, transport.name, rate.gb_per_s)
        return Peer(endpoint, stub, source.pool_id, channel, link, transport, rate)

    async def _describe(self, stub: kv_transfer_pb2_grpc.KvTransferServiceStub) -> PoolDescription:
        """What the other side says of its pool. Raises: AioRpcError, also where it will not pair with ours."""
        reader = kv_transfer_pb2.PoolDescription(
            fingerprint=self._mine.fingerprint,
            block_bytes=self._mine.block_bytes,
            num_blocks=self._mine.num_blocks,
            host_id=self._mine.host_id,
            pool_id=self._mine.pool_id,
        )
        paired = await stub.Pair(kv_transfer_pb2.PairRequest(reader=reader), timeout=self._pair_timeout_s)
        return description_from_wire(paired.source)

    def _choose(self, endpoint: str, source: PoolDescription, link: GrpcLink) -> Transport:
        """Shared memory where it is possible. Never silently something slower. Raises: PeerUnreachable."""
        if self._choice == "grpc":
            return self._stream(link)
        try:
            return self._share(source)
        except PeerUnreachable as error:
            if self._choice == "shared_memory":
                raise
            logger.warning("KV from %s goes over grpc, the slow way: %s", endpoint, error)
            return self._stream(link)

    def _stream(self, link: GrpcLink) -> StreamTransport:
        return StreamTransport(link, self._storage, self._mine.block_bytes)

    def _share(self, source: PoolDescription) -> SharedMemoryTransport:
        if source.shared_memory is None:
            raise PeerUnreachable("its pool is not in shared memory")
        if not can_map(self._mine, source):
            raise PeerUnreachable("it does not run on this host, or its processes cannot be seen from here")
        if self._storage.device.type != "cpu":
            raise PeerUnreachable("our pool is not in host memory")
        return SharedMemoryTransport(open_peer(source.shared_memory), self._storage, self._mine.block_bytes)


async def _close(peer: Peer) -> None:
    peer.transport.close()
    await peer.channel.close()
    peer.link.close()
