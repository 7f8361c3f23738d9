"""Memory behind a pool before its first use."""

import mmap
from pathlib import Path

import pytest
import torch

from kvtransfer.backing import back
from kvtransfer.memory import SharedPool

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


@pytest.mark.parametrize("nbytes", [1, 100, mmap.PAGESIZE, 5 * mmap.PAGESIZE + 1])
def test_private_memory_may_begin_and_end_anywhere_in_a_page(nbytes: int) -> None:
    storage = torch.zeros(nbytes + 26, dtype=torch.uint8)[13:-13]
    back(storage)
    assert not storage.any()
