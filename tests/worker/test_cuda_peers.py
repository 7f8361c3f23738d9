"""Links to pools on GPUs, by the fake driver: what is opened is let go of, and what cannot be copied is not used."""

import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from unittest.mock import Mock

import grpc
import pytest
import torch

from baton.engine.request import Reservation
from baton.kvtransfer.cuda_ipc import CudaDevice
from baton.kvtransfer.description import (
    DeviceMemoryHandle,
    PoolDescription,
    TransportChoice,
    Ways,
    host_id,
    possible_ways,
)
from baton.kvtransfer.puller import PullThread
from baton.kvtransfer.source import SourceTable
from baton.kvtransfer.transport import CopyStuck
from baton.process.serving.grpc_options import INTERNAL_SERVER_OPTIONS
from baton.protos import kv_transfer_pb2_grpc
from baton.worker.transfer import peers as module
from baton.worker.transfer.peers import PeerFailed, Peers
from baton.worker.transfer.reader import BlocksCorrupt, TransferReader
from baton.worker.transfer.source import TransferSource
from tests.fixtures.fake_cuda import FakeCuda, build
from tests.fixtures.fake_cuda_exporter import Exporter
from tests.fixtures.session_client import eventually

BLOCKS, BLOCK_BYTES = 16, 512


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def cuda(library: Path) -> Iterator[FakeCuda]:
    fake = FakeCuda(library)
    with fake.installed():
        yield fake
    fake.calls.fake_fail_after(-1)
    assert (fake.calls.fake_violations(), fake.calls.fake_opened()) == (0, 0)


@pytest.fixture
def exporter(library: Path, cuda: FakeCuda) -> Iterator[Exporter]:
    running = Exporter(library, BLOCKS, BLOCK_BYTES)
    yield running
    running.end()


def describe(*handles: DeviceMemoryHandle) -> PoolDescription:
    return PoolDescription(b"f" * 32, BLOCK_BYTES, BLOCKS, host_id(), secrets.token_bytes(16), device_memory=handles)


class Source:
    """The other worker's gRPC; the memory of its pool is the exporter's."""

    async def start(self, exporter: Exporter) -> None:
        self.pool = torch.arange(BLOCKS * BLOCK_BYTES).remainder(251).to(torch.uint8)
        """What is sent by gRPC: as the exporter's, unless a test makes that differ."""
        self.transfers = TransferSource(SourceTable(30.0, 30.0, 60.0), describe(exporter.handle), self.pool)
        self._server = grpc.aio.server(options=INTERNAL_SERVER_OPTIONS)
        kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(self.transfers, self._server)
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    def offer(self, *blocks: int) -> bytes:
        """A complete prompt's; the transfer's id."""
        identity = secrets.token_bytes(16)
        self.transfers.announce(identity, 1)
        self.transfers.advance(identity, blocks, ())
        return identity

    async def stop(self) -> None:
        await self._server.stop(None)


@pytest.fixture
async def source(exporter: Exporter) -> AsyncIterator[Source]:
    running = Source()
    await running.start(exporter)
    yield running
    await running.stop()


class Reader:
    def __init__(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        """What the driver has lent as memory of the host is taken for a pool on a GPU."""
        self._cuda = cuda
        self.pool, self._scratch = cuda.memory(BLOCKS * BLOCK_BYTES), cuda.memory(BLOCKS * BLOCK_BYTES)
        monkeypatch.setattr(CudaDevice, "scratch", lambda device, nbytes: self._scratch.data_ptr())

        def on_gpus(mine: PoolDescription, theirs: PoolDescription, device: str, choice: TransportChoice) -> Ways:
            return possible_ways(mine, theirs, "cuda", choice)

        monkeypatch.setattr(module, "possible_ways", on_gpus)
        self._opened: list[Peers] = []

    def peers(self, choice: TransportChoice = "auto") -> Peers:
        self._opened.append(Peers(describe(), self.pool, PullThread(None), choice, 5.0))
        return self._opened[-1]

    async def close(self) -> None:
        for peers in self._opened:
            await peers.close()
        self._cuda.free(self.pool)
        self._cuda.free(self._scratch)


@pytest.fixture
async def reader(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Reader]:
    running = Reader(cuda, monkeypatch)
    yield running
    await running.close()


async def test_memory_of_an_exited_source_is_closed_without_another_transfer(
    cuda: FakeCuda, source: Source, reader: Reader
) -> None:
    peers = reader.peers()
    peer = await peers.borrow(source.endpoint)
    assert (peer.transport.name, cuda.calls.fake_opened()) == ("cuda_ipc", 1)
    peers.give_back(peer)
    await source.stop()
    await eventually(lambda: cuda.calls.fake_opened() == 0)
    assert peer.forgotten and not peers.links


async def test_memory_read_while_its_source_exits_is_closed_afterwards(
    cuda: FakeCuda, source: Source, reader: Reader
) -> None:
    peers = reader.peers()
    peer = await peers.borrow(source.endpoint)
    await source.stop()
    await eventually(lambda: peer.forgotten)
    assert cuda.calls.fake_opened() == 1
    peers.give_back(peer)
    await eventually(lambda: cuda.calls.fake_opened() == 0)


async def test_transport_with_a_failing_first_copy_is_not_used(cuda: FakeCuda, source: Source, reader: Reader) -> None:
    cuda.calls.fake_fail_after(0)
    peers = reader.peers()
    peer = await peers.borrow(source.endpoint)
    assert (peer.transport.name, cuda.calls.fake_opened()) == ("grpc", 0)
    assert "cuda_ipc: copy from the peer's memory failed: cuMemcpyDtoDAsync_v2" in peer.fallback
    peers.give_back(peer)


async def test_only_allowed_transport_fails_with_its_first_copy(cuda: FakeCuda, source: Source, reader: Reader) -> None:
    cuda.calls.fake_fail_after(0)
    with pytest.raises(PeerFailed, match="copy from the peer's memory failed"):
        await reader.peers("cuda_ipc").borrow(source.endpoint)
    assert cuda.calls.fake_opened() == 0


async def test_first_copy_that_the_gpu_does_not_end_is_followed_by_no_other_way(
    source: Source, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaDevice, "copy", Mock(side_effect=CopyStuck("copy on cuda:0")))
    with pytest.raises(PeerFailed, match="copy on cuda:0"):
        await reader.peers().borrow(source.endpoint)


async def test_first_block_that_devices_copy_is_compared_with_its_source_once(source: Source, reader: Reader) -> None:
    right = source.pool.view(BLOCKS, -1)[7].clone()
    pulls = TransferReader(reader.peers())
    for destination in (2, 4):
        pull = await pulls.pull(source.endpoint, source.offer(7, 5), Reservation((destination, 1), 0))
        assert (pull.transport, pull.blocks) == ("cuda_ipc", 2)
        assert reader.pool.view(BLOCKS, -1)[destination].equal(right)
        source.pool.zero_()  # from now on a comparison would fail
    await pulls.close()


async def test_transport_that_changes_bytes_is_not_used_again(cuda: FakeCuda, source: Source, reader: Reader) -> None:
    source.pool.add_(1)  # so what the driver copies is wrong
    pulls = TransferReader(reader.peers())
    with pytest.raises(BlocksCorrupt, match="beginning of the first copied block differs"):
        await pulls.pull(source.endpoint, source.offer(7), Reservation((2,), 0))
    pull = await pulls.pull(source.endpoint, source.offer(7), Reservation((2,), 0))
    assert (pull.transport, pulls.integrity.checksum_mismatches) == ("grpc", 1)
    assert reader.pool.view(BLOCKS, -1)[2].equal(source.pool.view(BLOCKS, -1)[7])
    assert "cuda_ipc: its copies differ from the source's blocks" in pulls.links[0].fallback
    await pulls.close()
    assert cuda.calls.fake_opened() == 0
