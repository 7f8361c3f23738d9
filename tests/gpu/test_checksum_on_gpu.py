"""Checksums of a pool on a GPU are those of the same bytes in host memory, by words and by bytes."""

import pytest
import torch

from baton.kvtransfer.checksum import Checksums
from baton.kvtransfer.slices import PoolShape
from tests.gpu.device import CUDA, needs_gpu

pytestmark = needs_gpu


@pytest.mark.parametrize("row_bytes", [64, 28])
@pytest.mark.parametrize("parts", [1, 2])
def test_checksums_equal_the_hosts(row_bytes: int, parts: int) -> None:
    shape = PoolShape(num_blocks=3, block_bytes=4 * row_bytes, rows=4, parts=parts)
    host = torch.randint(256, (shape.parts * shape.part_bytes,), dtype=torch.uint8)
    on_host, on_gpu = Checksums(host, shape), Checksums(host.to(CUDA), shape)
    assert [on_gpu.of(block) for block in range(3)] == [on_host.of(block) for block in range(3)]
