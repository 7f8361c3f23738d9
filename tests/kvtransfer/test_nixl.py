"""KV read by NIXL out of host memory; on hosts with RDMA it is the same code. Where the library is not installed an
imitation of it stands in."""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from baton.kvtransfer import nixl_memory
from baton.kvtransfer.nixl_memory import NixlAgent, NixlTransport
from baton.kvtransfer.slices import PoolShape
from baton.kvtransfer.transport import BlockPair, LinkBroken, PeerUnreachable, SharedMemoryUnavailable
from tests.fixtures import imitated_nixl

INSTALLED = importlib.util.find_spec("nixl") is not None
SHAPE = PoolShape(num_blocks=6, block_bytes=4096, rows=4)
PAIRS = [BlockPair(0, 4, 1), BlockPair(1, 5, 2), BlockPair(2, 0, 4)]


def find(monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
    """From now on NIXL is that, or not installed where it is None."""
    found = Mock(util=Mock(find_spec=lambda name: library), import_module=lambda name: library)
    monkeypatch.setattr(nixl_memory, "importlib", found)


def test_without_nixl_it_is_said_that_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    find(monkeypatch, None)
    with pytest.raises(SharedMemoryUnavailable, match="nixl is not installed"):
        NixlAgent(torch.zeros(8, dtype=torch.uint8), "a", "lo", {})


def lay_out(folder: Path, *ports: str) -> Path:
    """As Linux shows interfaces: the ports of RDMA devices stand below the interface's device."""
    for port in ports:
        (folder / port).mkdir(parents=True)
    return folder


def test_rdma_devices_of_the_interface_are_named_before_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find(monkeypatch, imitated_nixl)
    interfaces = lay_out(
        tmp_path,
        "ib0/device/infiniband/mlx5_1/ports/2",
        "ib0/device/infiniband/mlx5_1/ports/1",
        "ib1/device/infiniband/mlx5_2/ports/1",
        "bond0/lower_ib0/device/infiniband/mlx5_1/ports/1",
        "bond0/lower_ib1/device/infiniband/mlx5_2/ports/1",
        "eth0/device/net/eth0",
    )
    named: list[str] = []
    for interface in ("ib0", "bond0", "eth0", "lo"):
        environment: dict[str, str] = {}
        NixlAgent(torch.zeros(8, dtype=torch.uint8), interface, interface, environment, interfaces).close()
        named.append(environment["UCX_NET_DEVICES"])
    assert named == ["mlx5_1:1,mlx5_1:2,ib0", "mlx5_1:1,mlx5_2:1,bond0", "eth0", "lo"]


class Agents:
    def __init__(self) -> None:
        self.pool = torch.arange(SHAPE.part_bytes).remainder(251).to(torch.uint8)
        self.own = torch.zeros_like(self.pool)
        self.source, self.reader = NixlAgent(self.pool, "source", "lo"), NixlAgent(self.own, "reader", "lo")


@pytest.fixture(params=["imitated", *(["installed"] if INSTALLED else [])])
def agents(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agents]:
    if request.param == "imitated":
        find(monkeypatch, imitated_nixl)
    agents = Agents()
    yield agents
    agents.reader.close()
    agents.source.close()


def test_blocks_are_copied_bit_for_bit_and_in_slices(agents: Agents) -> None:
    pool, own = agents.pool, agents.own
    transport = NixlTransport(agents.reader, agents.source.handle, SHAPE, SHAPE)
    assert transport.measure(1 << 20).bytes == SHAPE.part_bytes
    assert not own.any()
    assert transport.copy(b"", PAIRS) == 3 * 4096
    assert own.view(6, -1)[[1, 2, 4]].equal(pool.view(6, -1)[[4, 5, 0]])
    transport.close()
    with pytest.raises(LinkBroken):
        transport.copy(b"", PAIRS)
    halves = PoolShape(6, 4096, 4, parts=2)
    cut = NixlTransport(agents.reader, agents.source.handle, SHAPE, halves)
    cut.copy(b"", PAIRS)
    cut.close()
    assert own.view(2, 6, 4, 512)[:, 1].equal(pool.view(6, 4, 2, 512)[4].transpose(0, 1))


def test_source_that_cannot_be_read_any_more_breaks_the_link_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    find(monkeypatch, imitated_nixl)
    agents = Agents()
    transport = NixlTransport(agents.reader, agents.source.handle, SHAPE, SHAPE)
    agents.source.close()
    with pytest.raises(LinkBroken, match="NIXL reports that the read failed"):
        transport.copy(b"", PAIRS)
    with pytest.raises(LinkBroken, match="was closed"):
        transport.copy(b"", PAIRS)
    assert not agents.own.any() and agents.reader._agent.open_transfers == 0
    agents.reader.close()


def test_error_of_the_library_in_the_first_copy_breaks_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a fabric that is set up badly: then the next transport is tried."""
    find(monkeypatch, imitated_nixl)
    agents = Agents()
    transport = NixlTransport(agents.reader, agents.source.handle, SHAPE, SHAPE)

    def fail(*_: object) -> None:
        raise RuntimeError("no route")

    monkeypatch.setattr(agents.reader._agent, "initialize_xfer", fail)
    with pytest.raises(LinkBroken, match="nixl: no route"):
        transport.measure(1 << 20)
    transport.close()
    agents.reader.close()
    agents.source.close()


def test_missing_source_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    find(monkeypatch, imitated_nixl)
    agents = Agents()
    with pytest.raises(PeerUnreachable, match="no such agent"):
        NixlTransport(agents.reader, replace(agents.source.handle, metadata=b"gone"), SHAPE, SHAPE)
