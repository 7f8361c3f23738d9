"""Peers: workers from which this worker reads KV, after pairing once over the fastest transport that works."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import grpc
import torch

from baton.kvtransfer.checksum import BlockChecksum, Checksums
from baton.kvtransfer.cuda_ipc import CudaDevice, cuda_ipc_transport
from baton.kvtransfer.description import (
    PoolDescription,
    TransportChoice,
    TransportName,
    check_compatible,
    possible_ways,
)
from baton.kvtransfer.nixl_memory import NixlAgent, NixlTransport
from baton.kvtransfer.process_group import GroupOptions
from baton.kvtransfer.puller import PullThread
from baton.kvtransfer.shared_memory import SharedMemoryTransport, open_peer
from baton.kvtransfer.slices import Storage, WithCopies, parts_of
from baton.kvtransfer.stream import StreamTransport, compare_beginning
from baton.kvtransfer.transport import (
    BlockPair,
    CopyBroken,
    CopyStuck,
    LinkBroken,
    LinkRate,
    PeerUnreachable,
    TransferError,
    Transport,
)
from baton.process.security.cluster_secret import ClusterSecret
from baton.process.security.tls import InternalTls, open_async_channel, open_channel
from baton.process.serving.grpc_options import INTERNAL_CHANNEL_OPTIONS
from baton.process.wire_bounds import OutOfBounds
from baton.protos import kv_transfer_pb2, kv_transfer_pb2_grpc
from baton.worker.incoming.transfers import TRANSFERS
from baton.worker.transfer.process_groups import join_group
from baton.worker.transfer.tcp_links import connect_tcp
from baton.worker.transfer.wire import description_from_wire, description_to_wire

logger = logging.getLogger(__name__)
PROBE_BYTES = 8 << 20
READ_TIMEOUT_S = 10.0
COPIED_BY_DEVICES = frozenset({"cuda_ipc", "nixl", "nccl"})
"""Transports in which devices copy: on a misconfigured machine they may corrupt bytes unnoticed."""
SWEEP_PERIOD_S = 0.25
NEVER_IDLE = ("grpc.client_idle_timeout_ms", 2**31 - 1)  # otherwise gRPC closes a connection without calls after 30 min


class PeerFailed(Exception):
    """Error of a pairing with another worker, or of a copy from it."""


@dataclass(frozen=True, slots=True)
class PeerLink:
    """Pairing with another worker, as `baton status` shows it."""

    endpoint: str
    transport: str
    gb_per_s: float
    fallback: str


class _Source(NamedTuple):
    """Worker with which this one is pairing."""

    endpoint: str
    pool: PoolDescription
    stub: kv_transfer_pb2_grpc.KvTransferServiceStub
    link: "GrpcLink"


@dataclass(frozen=True, slots=True)
class _Chosen:
    transport: Transport
    rate: LinkRate
    fallback: str  # why no faster transport was chosen


@dataclass(eq=False, slots=True)
class Peer:
    """Paired worker. Its links are closed once it is forgotten and unused."""

    endpoint: str
    stub: kv_transfer_pb2_grpc.KvTransferServiceStub
    pool_id: bytes  # pool of the paired process; a later process at the endpoint has another pool
    channel: grpc.aio.Channel
    link: "GrpcLink"
    transport: Transport
    rate: LinkRate
    fallback: str = ""  # why no faster transport was chosen
    compare: Callable[[bytes, BlockPair], None] | None = None  # check of the first copied block; None: not pending
    users: int = 0
    forgotten: bool = False


class GrpcLink:
    """Blocking reads of blocks over gRPC (KvTransfer.Read), for the pull thread."""

    def __init__(self, endpoint: str, tls: InternalTls | None = None, secret: ClusterSecret | None = None) -> None:
        self._channel = open_channel(endpoint, INTERNAL_CHANNEL_OPTIONS, tls, secret)
        self.stub = kv_transfer_pb2_grpc.KvTransferServiceStub(self._channel)

    def read(self, transfer_id: bytes, first_block: int, num_blocks: int) -> Iterator[bytes]:
        asked = kv_transfer_pb2.TransferRange(transfer_id=transfer_id, first_block=first_block, num_blocks=num_blocks)
        yield from self._pieces(kv_transfer_pb2.ReadRequest(range=asked))

    def probe(self, size_bytes: int) -> Iterator[bytes]:
        yield from self._pieces(kv_transfer_pb2.ReadRequest(probe_bytes=size_bytes))

    def _pieces(self, request: kv_transfer_pb2.ReadRequest) -> Iterator[bytes]:
        try:
            for response in self.stub.Read(request, timeout=READ_TIMEOUT_S):
                yield response.data
        except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed
            raise CopyBroken(f"read over gRPC failed: {error}") from error

    def close(self) -> None:
        self._channel.close()


class Peers:
    """Pairings of this worker with others, from which it copies blocks into `storage`. `mine` describes `storage`."""

    def __init__(
        self,
        mine: PoolDescription,
        storage: Storage,
        thread: PullThread,
        choice: TransportChoice,
        pair_timeout_s: float,
        groups: GroupOptions | None = None,
        nixl: NixlAgent | None = None,
        tls: InternalTls | None = None,
        copies: Sequence[torch.Tensor] = (),
        secret: ClusterSecret | None = None,
    ) -> None:
        """Create the peers. `copies`: copies of `storage` on other ranks, which receive the same blocks."""
        self._mine = mine
        self._storage = storage
        self._copies = copies
        self._parts = parts_of(storage, mine.shape)
        self._checksums = Checksums(storage, mine.shape)
        self._thread = thread
        self._choice = choice
        self._pair_timeout_s = pair_timeout_s
        self._groups = groups
        self._nixl = nixl
        self._tls = tls
        self._secret = secret
        self._pairings: dict[str, asyncio.Task[Peer]] = {}
        self._sweeping: asyncio.Task[None] | None = None
        self._unfit: dict[tuple[bytes, str], str] = {}  # why a transport is not used again, by pool and transport
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    async def borrow(self, endpoint: str) -> Peer:
        """Return the peer at `endpoint`, pairing at the first call. Call `give_back` once. Raises: PeerFailed."""
        while not self._closed:
            pairing = self._pairings.get(endpoint)
            if pairing is None:
                self._sweeping = self._sweeping or asyncio.create_task(self._sweep())
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
        """Forget a peer that is gone; the next `borrow` of its endpoint pairs again."""
        if peer.forgotten:
            return
        peer.forgotten = True
        del self._pairings[peer.endpoint]
        self._close_if_unused(peer)

    async def copy(self, peer: Peer, transfer_id: bytes, pairs: Sequence[BlockPair]) -> LinkRate:
        """Copy blocks and return the rate. A cancelled call returns only after the copy. Raises: PeerFailed."""
        try:
            return await self._thread.copy(peer.transport, transfer_id, pairs)
        except LinkBroken as error:
            self.forget(peer)  # the next transfer pairs again
            raise PeerFailed(f"copy failed: {error}") from error
        except TransferError as error:
            raise PeerFailed(f"copy failed: {error}") from error

    async def check(
        self, peer: Peer, transfer_id: bytes, pairs: Sequence[BlockPair], wanted: Sequence[BlockChecksum]
    ) -> None:
        """Compare blocks of this pool with the checksums `wanted`. For a transport of COPIED_BY_DEVICES, also compare
        the first block after the pairing with the source's bytes, read over gRPC. Raises: ChecksumDiffers, PeerFailed.
        """
        if pairs and peer.compare is not None:
            try:
                await self._thread.compare(partial(peer.compare, transfer_id, pairs[0]))
            except CopyBroken as error:
                raise PeerFailed(f"comparison of the first block failed: {error}") from error
            peer.compare = None
        if wanted:
            await self._thread.check(self._checksums, wanted)

    def distrust(self, peer: Peer) -> None:
        """Record a corrupt block. If it was the first one compared since the pairing, do not use the transport for the
        peer's pool again.
        """
        if peer.compare is not None:
            self._unfit[peer.pool_id, peer.transport.name] = "its copies differ from the source's blocks"
            self.forget(peer)

    @property
    def links(self) -> tuple[PeerLink, ...]:
        """Return the links of all paired peers."""
        return tuple(PeerLink(p.endpoint, p.transport.name, p.rate.gb_per_s, p.fallback) for p in self._paired)

    @property
    def _paired(self) -> list[Peer]:
        pairings = [each for each in self._pairings.values() if each.done() and not each.cancelled()]
        return [each.result() for each in pairings if each.exception() is None]

    async def close(self) -> None:
        """Close all links, which ends running copies."""
        self._closed = True
        if self._sweeping is not None:  # stop the sweep first, because it closes peers too
            self._sweeping.cancel()
            with suppress(asyncio.CancelledError):
                await self._sweeping
        for pairing in self._pairings.values():
            pairing.cancel()
        pairings = await asyncio.gather(*self._pairings.values(), return_exceptions=True)
        await asyncio.gather(*(_close(peer) for peer in pairings if isinstance(peer, Peer)), *self._closing)
        await asyncio.to_thread(self._thread.close)  # waits for the running copy, whose link has just been closed

    def _on_paired(self, endpoint: str, pairing: "asyncio.Task[Peer]") -> None:
        """Forget a failed pairing, so that the next request retries."""
        if pairing.cancelled() or pairing.exception() is not None:
            del self._pairings[endpoint]

    def _close_if_unused(self, peer: Peer) -> None:
        if peer.forgotten and peer.users == 0:
            task = asyncio.create_task(_close(peer))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _pair(self, endpoint: str) -> Peer:
        """Pair with a worker. Raises: PeerFailed, after which nothing stays open."""
        try:
            async with AsyncExitStack() as undo:
                options = (*INTERNAL_CHANNEL_OPTIONS, NEVER_IDLE)
                channel = open_async_channel(endpoint, options, self._tls, self._secret)
                undo.push_async_callback(channel.close)
                link = GrpcLink(endpoint, self._tls, self._secret)
                undo.callback(link.close)
                stub = kv_transfer_pb2_grpc.KvTransferServiceStub(channel)
                pool = await self._describe(stub)
                check_compatible(self._mine, pool)
                chosen = await self._choose(_Source(endpoint, pool, stub, link))
                undo.pop_all()
        except grpc.aio.AioRpcError as error:
            raise PeerFailed(f"pairing with {endpoint} failed: {error.code().name} {error.details()}") from error
        except (TransferError, OutOfBounds) as error:
            raise PeerFailed(f"pairing with {endpoint} failed: {error}") from error
        logger.info("paired with %s over %s: %.2f GB/s", endpoint, chosen.transport.name, chosen.rate.gb_per_s)
        transport, rate, compare = chosen.transport, chosen.rate, None
        if transport.name in COPIED_BY_DEVICES:
            compare = partial(compare_beginning, link, self._storage, pool.shape, self._mine.shape)
        return Peer(endpoint, stub, pool.pool_id, channel, link, transport, rate, chosen.fallback, compare)

    async def _sweep(self) -> None:
        """Forget peers whose connection is lost, periodically until cancelled.

        Without this, a dead process may go unnoticed until the next transfer, and its memory, which is mapped here,
        stays allocated. A pending `wait_for_state_change` would keep the connection of a closed channel open.
        """
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            for peer in self._paired:
                if peer.channel.get_state() is not grpc.ChannelConnectivity.READY:
                    self.forget(peer)

    async def _describe(self, stub: kv_transfer_pb2_grpc.KvTransferServiceStub) -> PoolDescription:
        """Request the description of the peer's pool and return it. Raises: OutOfBounds; AioRpcError, for instance if
        the peer refuses to pair.
        """
        reader = description_to_wire(replace(self._mine, shared_memory=None, device_memory=(), nixl=None))
        paired = await stub.Pair(kv_transfer_pb2.PairRequest(reader=reader), timeout=self._pair_timeout_s)
        TRANSFERS.check(paired)
        return description_from_wire(paired.source)

    async def _choose(self, source: _Source) -> _Chosen:
        """Choose the fastest transport that opens and copies. Raises: TransferError."""
        ways = possible_ways(self._mine, source.pool, self._parts[0].device.type, self._choice)
        failed: list[str] = []
        for name in ways.possible:
            if reason := self._unfit.get((source.pool.pool_id, name)):
                failed.append(f"{name}: {reason}")
                continue
            try:
                transport, rate = await self._try(name, source)
            except CopyStuck:
                raise
            except TransferError as error:
                if self._choice != "auto":
                    raise
                failed.append(f"{name}: {error}")
                continue
            between_hosts = name in ("tcp", "grpc") and self._choice == "auto"
            fallback = "; ".join([*ways.reasons, *failed] if between_hosts else failed)
            if between_hosts and name == "grpc":
                logger.warning("KV from %s is read over grpc, the slowest transport: %s", source.endpoint, fallback)
            return _Chosen(transport, rate, fallback)
        raise PeerUnreachable("; ".join([*ways.reasons, *failed]))

    async def _try(self, name: TransportName, source: _Source) -> tuple[Transport, LinkRate]:
        """Open a transport and measure it. Raises: TransferError, after which nothing stays open."""
        with ExitStack() as undo:
            transport = self._copied_on(await self._open(name, source))
            undo.callback(transport.close)
            rate = await self._thread.measure(transport, PROBE_BYTES)
            undo.pop_all()
        return transport, rate

    def _copied_on(self, transport: Transport) -> Transport:
        return WithCopies(transport, self._parts[0], self._copies, self._mine.shape) if self._copies else transport

    async def _open(self, name: TransportName, source: _Source) -> Transport:
        """Open a transport. Raises: PeerUnreachable."""
        own, pool = self._mine.shape, source.pool
        if name == "shared_memory" and pool.shared_memory is not None and isinstance(self._storage, torch.Tensor):
            memory = open_peer(pool.shared_memory, pool.pool_id)
            return SharedMemoryTransport(memory, self._storage, pool.shape, own)
        if name == "cuda_ipc":
            return cuda_ipc_transport(self._parts, own, pool.device_memory, pool.shape, CudaDevice)
        if name == "nixl" and self._nixl is not None and pool.nixl is not None:
            return NixlTransport(self._nixl, pool.nixl, pool.shape, own)
        if name in ("nccl", "gloo") and self._groups is not None:
            return await join_group(source.stub, source.link.stub, self._mine, pool, self._storage, self._groups)
        if name == "tcp":
            return await connect_tcp(source.endpoint, pool, self._storage, own, self._tls)
        if name == "grpc":
            return StreamTransport(source.link, self._storage, pool.shape, own)
        raise PeerUnreachable(f"{name} is not possible between these pools")


async def _close(peer: Peer) -> None:
    peer.transport.close()
    await peer.channel.close()
    peer.link.close()
