"""KV between two processes on a GPU by CUDA's inter-process handles, also where the exporter is killed in mid-copy."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from baton.kvtransfer.cuda_ipc import CudaDevice, CudaIpcTransport, OwnPool, export_pool
from baton.kvtransfer.description import DeviceMemoryHandle
from baton.kvtransfer.slices import PoolShape
from baton.kvtransfer.transport import BlockPair, CopyBroken, PeerUnreachable

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BLOCKS, BLOCK_BYTES, ROWS = 256, 4 << 20, 64  # a block of Llama-8B's shape in bf16
SHAPE = PoolShape(BLOCKS, BLOCK_BYTES, ROWS)
PAIRS = [BlockPair(index, (index * 7) % BLOCKS, (index * 5 + 3) % BLOCKS) for index in range(BLOCKS)]
EXPORTER = f"""
import sys, torch
from baton.kvtransfer.cuda_ipc import export_pool
torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
pool = torch.arange({BLOCKS}, dtype=torch.uint8, device="cuda").repeat_interleave({BLOCK_BYTES})
pool.view({BLOCKS}, {ROWS}, -1)[:, :, -1] = 77
torch.cuda.synchronize()
handle = export_pool(pool)
print(handle.handle.hex(), handle.offset_bytes, handle.size_bytes, flush=True)
sys.stdin.read()
"""


class Exporter:
    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", EXPORTER], stdin=-1, stdout=-1, text=True)
        assert self.process.stdout is not None
        handle, offset, size = self.process.stdout.readline().split()
        self.handle = DeviceMemoryHandle(bytes.fromhex(handle), int(offset), int(size))

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    running = Exporter()
    yield running
    running.kill()


def open_transport(
    exporter: Exporter, pool: torch.Tensor, own: PoolShape = SHAPE, own_parts: list[int] | None = None
) -> CudaIpcTransport:
    first = own_parts[0] if own_parts else 0
    own_pool = OwnPool(pool.data_ptr(), pool.numel(), first)
    return CudaIpcTransport(CudaDevice(pool.device), [exporter.handle], own_pool, SHAPE, own, own_parts)


def empty_pool(nbytes: int = BLOCKS * BLOCK_BYTES) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device="cuda:0")


def expected_block(source: int) -> torch.Tensor:
    block = torch.full((ROWS, BLOCK_BYTES // ROWS), source, dtype=torch.uint8)
    block[:, -1] = 77
    return block.flatten()


@pytest.mark.parametrize("batches", [True, False])
def test_every_block_is_copied_bit_for_bit(exporter: Exporter, batches: bool) -> None:
    pool = empty_pool()
    transport = open_transport(exporter, pool)
    device = transport._memory._device  # type: ignore[attr-defined]
    device._batches = batches and device._batches
    assert transport.copy(b"", PAIRS) == BLOCKS * BLOCK_BYTES
    transport.close()
    for pair in PAIRS:
        assert pool.view(BLOCKS, -1)[pair.destination].cpu().equal(expected_block(pair.source))


def test_rank_takes_its_heads_of_every_row(exporter: Exporter) -> None:
    own = PoolShape(BLOCKS, BLOCK_BYTES, ROWS, parts=2)
    pool = empty_pool(own.part_bytes)
    transport = open_transport(exporter, pool, own, [1])
    transport.copy(b"", PAIRS[:9])
    transport.close()
    for pair in PAIRS[:9]:
        half = expected_block(pair.source).view(ROWS, 2, -1)[:, 1]
        assert pool.view(BLOCKS, ROWS, -1)[pair.destination].cpu().equal(half)


def test_link_is_measured_without_writing_a_pool(exporter: Exporter) -> None:
    pool = empty_pool()
    transport = open_transport(exporter, pool)
    assert transport.measure(64 << 20).gb_per_s > 1
    transport.close()
    assert not pool.any()


def test_killed_exporter_does_not_kill_the_reader_in_mid_copy(exporter: Exporter) -> None:
    pool = empty_pool()
    transport = open_transport(exporter, pool)
    device = transport._memory._device  # type: ignore[attr-defined]
    start = device._start

    def start_and_kill(spans: object) -> None:
        start(spans)
        exporter.kill()  # the copies are queued: the GPU is reading what its owner has left behind

    device._start = start_and_kill
    started = time.monotonic()
    try:
        for _ in range(8):
            transport.copy(b"", PAIRS)  # stale: nobody is left to confirm it
    except CopyBroken:
        pass  # as good
    assert time.monotonic() - started < 30
    transport.close()
    usable = torch.ones(1 << 20, device="cuda:0")
    assert usable.sum().item() == 1 << 20


def test_pool_of_an_exited_owner_cannot_be_opened(exporter: Exporter) -> None:
    exporter.kill()
    with pytest.raises(PeerUnreachable):
        open_transport(exporter, empty_pool())


def test_repeated_links_leak_no_memory(exporter: Exporter) -> None:
    pool = empty_pool()
    open_transport(exporter, pool).close()
    free_before, _ = torch.cuda.mem_get_info()
    for _ in range(5):
        transport = open_transport(exporter, pool)
        transport.copy(b"", PAIRS[:4])
        transport.close()
    assert torch.cuda.mem_get_info()[0] >= free_before - (1 << 20)


def test_pool_in_the_middle_of_an_allocation_says_where_it_begins() -> None:
    whole = torch.empty(64 << 20, dtype=torch.uint8, device="cuda:0")
    front, back = export_pool(whole), export_pool(whole[1 << 20 :])
    assert back.offset_bytes - front.offset_bytes == 1 << 20
    assert back.handle == front.handle
