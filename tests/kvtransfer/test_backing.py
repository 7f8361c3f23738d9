"""Memory behind a pool before its first use."""

import mmap
import resource
from pathlib import Path

import pytest
import torch

from baton.kvtransfer.shared_memory import SharedPool, back, map_in, open_peer

NBYTES = 8 << 20


def resident_shared_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[2]) * mmap.PAGESIZE


def test_all_of_a_pool_is_there_before_its_first_use_and_keeps_its_contents() -> None:
    pool = SharedPool.create(NBYTES + 5 * mmap.PAGESIZE)
    try:
        pool.tensor[NBYTES // 2] = 7
        before = resident_shared_bytes()
        back(pool.tensor)
        assert resident_shared_bytes() - before >= NBYTES
        assert int(pool.tensor.sum(dtype=torch.int64)) == 7
    finally:
        pool.close()


def test_memory_backed_by_another_process_is_mapped_before_reading() -> None:
    """The kernel maps 16 pages at a fault: without `map_in`, reading makes at least a fault for every 16 pages."""
    pool = SharedPool.create(8 * NBYTES)
    try:
        back(pool.tensor)
        peer = open_peer(pool.handle)
        map_in(peer.array)
        in_advance = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        assert int(peer.array.sum(dtype="int64")) == 0
        reading = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - in_advance
        assert reading < 8 * NBYTES // mmap.PAGESIZE // 64
        peer.close()
    finally:
        pool.close()


@pytest.mark.parametrize("nbytes", [1, 100, mmap.PAGESIZE, 5 * mmap.PAGESIZE + 1])
def test_private_memory_may_begin_and_end_anywhere_in_a_page(nbytes: int) -> None:
    storage = torch.zeros(nbytes + 26, dtype=torch.uint8)[13:-13]
    back(storage)
    assert not storage.any()
