"""KV read by NIXL out of host memory; on hosts with RDMA it is the same code."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from kvtransfer.errors import LinkBroken, SharedMemoryUnavailable
from kvtransfer.nixl_memory import NixlAgent, NixlTransport
from kvtransfer.slices import PoolShape
from kvtransfer.transport import BlockPair

INSTALLED = importlib.util.find_spec("nixl") is not None
SHAPE = PoolShape(num_blocks=6, block_bytes=4096, rows=4)
PAIRS = [BlockPair(0, 4, 1), BlockPair(1, 5, 2), BlockPair(2, 0, 4)]


@pytest.mark.skipif(INSTALLED, reason="it is installed")
def test_without_nixl_it_is_said_that_it_is_missing() -> None:
    with pytest.raises(SharedMemoryUnavailable, match="nixl is not installed"):
        NixlAgent(torch.zeros(8, dtype=torch.uint8), "a", "lo", {})


@pytest.fixture
def agents() -> Iterator[tuple[NixlAgent, NixlAgent, torch.Tensor, torch.Tensor]]:
    pool = torch.arange(SHAPE.part_bytes).remainder(251).to(torch.uint8)
    own = torch.zeros_like(pool)
    source, reader = NixlAgent(pool, "source", "lo"), NixlAgent(own, "reader", "lo")
    yield source, reader, pool, own
    reader.close()
    source.close()


@pytest.mark.skipif(not INSTALLED, reason="needs the nixl extra")
def test_blocks_come_bit_for_bit_and_in_slices(agents: tuple[NixlAgent, NixlAgent, torch.Tensor, torch.Tensor]) -> None:
    source, reader, pool, own = agents
    transport = NixlTransport(reader, source.handle, SHAPE, SHAPE)
    assert transport.measure(1 << 20).bytes == SHAPE.part_bytes
    assert not own.any()
    assert transport.copy(b"", PAIRS) == 3 * 4096
    assert own.view(6, -1)[[1, 2, 4]].equal(pool.view(6, -1)[[4, 5, 0]])
    transport.close()
    with pytest.raises(LinkBroken):
        transport.copy(b"", PAIRS)
    halves = PoolShape(6, 4096, 4, parts=2)
    cut = NixlTransport(reader, source.handle, SHAPE, halves)
    cut.copy(b"", PAIRS)
    cut.close()
    assert own.view(2, 6, 4, 512)[:, 1].equal(pool.view(6, 4, 2, 512)[4].transpose(0, 1))
