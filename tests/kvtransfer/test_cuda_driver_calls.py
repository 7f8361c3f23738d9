"""What is asked of CUDA's driver, by its rules: order, lifetimes, errors, a peer's death. Two processes, no GPU."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton.kvtransfer import cuda_ipc
from baton.kvtransfer.cuda_ipc import CudaDevice, CudaIpcTransport, OwnPool, export_pool
from baton.kvtransfer.slices import PoolShape
from baton.kvtransfer.transport import BlockPair, CopyBroken, CopyStuck, PeerUnreachable, SharedMemoryUnavailable
from tests.fixtures.fake_cuda import FakeCuda, build
from tests.fixtures.fake_cuda_exporter import LEAD, Exporter
from tests.fixtures.waiting import wait_until

BLOCKS, BLOCK_BYTES, ROWS = 16, 512, 4
SHAPE = PoolShape(BLOCKS, BLOCK_BYTES, ROWS)
PAIRS = [BlockPair(index, (index * 7) % BLOCKS, (index * 5 + 3) % BLOCKS) for index in range(BLOCKS)]
SOURCE = torch.arange(BLOCKS * BLOCK_BYTES).remainder(251).to(torch.uint8).view(BLOCKS, BLOCK_BYTES)


@pytest.fixture(scope="module", params=["with batches", "one by one"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drivers of CUDA 13 and 12."""
    flags = () if request.param == "with batches" else ("-DWITHOUT_BATCHES",)
    return build(tmp_path_factory.mktemp("driver"), *flags)


@pytest.fixture
def cuda(library: Path) -> Iterator[FakeCuda]:
    """At the end nothing is left open, and no rule of the driver was broken."""
    fake = FakeCuda(library)
    with fake.installed():
        yield fake
    for setting in (fake.calls.fake_copies_take, fake.calls.fake_stall, fake.calls.fake_batches_fail):
        setting(0)
    fake.calls.fake_dead_owner_fails(0)
    fake.calls.fake_fail_after(-1)
    assert (fake.calls.fake_violations(), fake.calls.fake_opened(), fake.calls.fake_contexts()) == (0, 0, 0)


@pytest.fixture
def pool(cuda: FakeCuda) -> Iterator[torch.Tensor]:
    memory = cuda.memory(BLOCKS * BLOCK_BYTES)
    yield memory
    cuda.free(memory)


@pytest.fixture
def exporter(library: Path, cuda: FakeCuda) -> Iterator[Exporter]:
    running = Exporter(library, BLOCKS, BLOCK_BYTES)
    yield running
    running.end()


def transport_to(
    exporter: Exporter, pool: torch.Tensor, own: PoolShape = SHAPE, own_parts: list[int] | None = None
) -> CudaIpcTransport:
    own_pool = OwnPool(pool.data_ptr(), pool.numel(), own_parts[0] if own_parts else 0)
    return CudaIpcTransport(CudaDevice(pool.device), [exporter.handle], own_pool, SHAPE, own, own_parts)


def arrived(pool: torch.Tensor, pairs: list[BlockPair] = PAIRS) -> bool:
    blocks = pool.view(BLOCKS, -1)
    return all(blocks[pair.destination].equal(SOURCE[pair.source]) for pair in pairs)


def test_blocks_are_there_when_a_copy_returns(cuda: FakeCuda, exporter: Exporter, pool: torch.Tensor) -> None:
    cuda.calls.fake_copies_take(3000)
    transport = transport_to(exporter, pool)
    assert transport.copy(b"", PAIRS) == BLOCKS * BLOCK_BYTES
    assert arrived(pool)
    transport.close()


def test_rank_takes_its_heads_of_every_row(cuda: FakeCuda, exporter: Exporter) -> None:
    own = PoolShape(BLOCKS, BLOCK_BYTES, ROWS, parts=2)
    memory = cuda.memory(own.part_bytes)
    transport = transport_to(exporter, memory, own, [1])
    transport.copy(b"", PAIRS[:5])
    transport.close()
    halves = SOURCE.view(BLOCKS, ROWS, 2, -1)[:, :, 1]
    for pair in PAIRS[:5]:
        assert memory.view(BLOCKS, ROWS, -1)[pair.destination].equal(halves[pair.source])
    cuda.free(memory)


def test_pool_in_the_middle_of_an_allocation_says_where_it_begins(exporter: Exporter) -> None:
    assert exporter.handle.offset_bytes == LEAD
    assert exporter.second_half.offset_bytes == LEAD + BLOCKS * BLOCK_BYTES // 2
    assert exporter.second_half.handle == exporter.handle.handle


def test_link_is_measured_without_writing_the_pool(exporter: Exporter, pool: torch.Tensor, cuda: FakeCuda) -> None:
    transport, scratch = transport_to(exporter, pool), cuda.memory(BLOCKS * BLOCK_BYTES)
    device = transport._memory._device  # type: ignore[attr-defined]
    device.scratch = lambda nbytes: scratch.data_ptr()
    assert transport.measure(1 << 20).bytes == BLOCKS * BLOCK_BYTES
    assert not pool.any()
    assert scratch.view(BLOCKS, -1).equal(SOURCE)
    transport.close()
    cuda.free(scratch)


def test_link_closed_in_mid_copy_stays_open_until_its_end(
    cuda: FakeCuda, exporter: Exporter, pool: torch.Tensor
) -> None:
    transport = transport_to(exporter, pool)
    cuda.calls.fake_stall(1)
    copying = threading.Thread(target=transport.copy, args=(b"", PAIRS))
    copying.start()
    memory = transport._memory
    wait_until(lambda: memory._copying)  # type: ignore[attr-defined]
    transport.close()
    assert cuda.calls.fake_opened() == 1
    cuda.calls.fake_stall(0)
    copying.join(20)
    assert arrived(pool)
    assert cuda.calls.fake_opened() == 0


def test_links_are_opened_and_closed_repeatedly(cuda: FakeCuda, exporter: Exporter, pool: torch.Tensor) -> None:
    for _ in range(5):
        transport = transport_to(exporter, pool)
        transport.copy(b"", PAIRS[:4])
        transport.close()
        assert cuda.calls.fake_opened() == 0


def test_where_batches_fail_blocks_are_copied_one_by_one(
    cuda: FakeCuda, exporter: Exporter, pool: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.calls.fake_batches_fail(1)
    transport = transport_to(exporter, pool)
    transport.copy(b"", PAIRS)
    transport.copy(b"", PAIRS)
    assert arrived(pool)
    transport.close()
    batched = hasattr(cuda.calls, "cuMemcpyBatchAsync_v2")
    assert len([line for line in caplog.messages if "batched GPU copies failed" in line]) == batched


def test_partly_rejected_copy_has_ended_when_it_is_reported(
    cuda: FakeCuda, exporter: Exporter, pool: torch.Tensor
) -> None:
    """The copies that were started before the refusal write the pool until then."""
    cuda.calls.fake_batches_fail(1)
    cuda.calls.fake_copies_take(5000)
    cuda.calls.fake_fail_after(3)
    transport = transport_to(exporter, pool)
    with pytest.raises(CopyBroken, match="cuMemcpyDtoDAsync_v2: CUDA_ERROR_INVALID_VALUE"):
        transport.copy(b"", PAIRS)
    assert arrived(pool, PAIRS[:3])
    before = pool.clone()
    transport.close()
    time.sleep(0.02)  # nothing is written any more
    assert pool.equal(before)


@pytest.mark.parametrize("fails", [False, True])
def test_killed_exporter_does_not_kill_the_reader_in_mid_copy(
    cuda: FakeCuda, exporter: Exporter, pool: torch.Tensor, fails: bool
) -> None:
    """The driver keeps what is open, or the copies fail: both are known."""
    cuda.calls.fake_dead_owner_fails(int(fails))
    transport = transport_to(exporter, pool)
    device = transport._memory._device  # type: ignore[attr-defined]
    start = device._start

    def start_and_kill(spans: object) -> None:
        cuda.calls.fake_stall(1)
        start(spans)
        exporter.kill()
        cuda.calls.fake_stall(0)

    device._start = start_and_kill
    if fails:
        with pytest.raises(CopyBroken, match="the GPU failed"):
            transport.copy(b"", PAIRS)
    else:
        transport.copy(b"", PAIRS)
        assert arrived(pool)
    transport.close()
    with pytest.raises(PeerUnreachable, match="cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE"):
        transport_to(exporter, pool)


def test_copy_that_does_not_end_is_stuck(
    cuda: FakeCuda, exporter: Exporter, pool: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_ipc, "COPY_TIMEOUT_S", 0.05)
    transport = transport_to(exporter, pool)
    cuda.calls.fake_stall(1)
    with pytest.raises(CopyStuck):
        transport.copy(b"", PAIRS)
    assert not pool.any()
    cuda.calls.fake_stall(0)
    wait_until(lambda: arrived(pool))  # as was feared: it still writes
    transport.close()


def test_memory_of_our_own_process_is_not_opened(cuda: FakeCuda, pool: torch.Tensor) -> None:
    handle = export_pool(pool)
    with pytest.raises(PeerUnreachable, match="CUDA_ERROR_INVALID_VALUE"):
        CudaDevice(pool.device).open_handle(handle.handle)


def test_memory_that_the_driver_does_not_know_is_not_exported(cuda: FakeCuda) -> None:
    with pytest.raises(SharedMemoryUnavailable, match="cuMemGetAddressRange_v2: CUDA_ERROR_INVALID_VALUE"):
        export_pool(torch.zeros(64, dtype=torch.uint8))


def test_missing_device_is_named_by_the_driver(cuda: FakeCuda) -> None:
    with pytest.raises(PeerUnreachable, match="cuDeviceGet: unknown"):
        CudaDevice(torch.device("cuda", 7))
