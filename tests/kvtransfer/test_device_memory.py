"""What surrounds a driver's calls, over a device whose memory is the host's. The calls themselves: tests/gpu."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from baton.kvtransfer.cuda_ipc import CudaIpcTransport, OwnPool, cuda_ipc_transport
from baton.kvtransfer.description import DeviceMemoryHandle
from baton.kvtransfer.shared_memory import SharedPool
from baton.kvtransfer.slices import PoolShape
from baton.kvtransfer.transport import BlockOutOfRange, BlockPair, PeerUnreachable
from tests.fixtures.host_device import HostDevice, export

SHAPE = PoolShape(num_blocks=6, block_bytes=64, rows=2)
LEAD = 40  # bytes before the pool in what is exported
PAIRS = [BlockPair(0, 4, 1), BlockPair(1, 5, 2), BlockPair(2, 0, 4)]


@contextmanager
def exported(shape: PoolShape = SHAPE) -> Iterator[tuple[torch.Tensor, list[DeviceMemoryHandle]]]:
    """A pool and the handles of its parts, each an allocation of its own with something in front."""
    pool = torch.arange(shape.parts * shape.part_bytes).remainder(251).to(torch.uint8)
    shared = [SharedPool.create(LEAD + shape.part_bytes) for _ in range(shape.parts)]
    for memory, part in zip(shared, pool.view(shape.parts, -1), strict=True):
        memory.tensor[LEAD:].copy_(part)
    yield pool, [export(memory, LEAD, shape.part_bytes) for memory in shared]
    for memory in shared:
        memory.close()


def transport_to(
    own: torch.Tensor, device: HostDevice, handles: list[DeviceMemoryHandle], source: PoolShape = SHAPE
) -> CudaIpcTransport:
    return CudaIpcTransport(device, handles, OwnPool(own.data_ptr(), own.numel()), source, SHAPE)


def test_each_rank_of_the_source_has_its_own_memory() -> None:
    own, device = torch.zeros(6 * 64, dtype=torch.uint8), HostDevice()
    cut = PoolShape(num_blocks=6, block_bytes=64, rows=2, parts=2)
    with exported(cut) as (pool, handles):
        transport = transport_to(own, device, handles, cut)
        transport.copy(b"", PAIRS)
        transport.close()
    ranks = pool.view(2, 6, 2, 16)  # [part][block][row]
    assert own.view(6, 2, 2, 16)[1].equal(ranks[:, 4].transpose(0, 1))
    assert device.open_handles == 0


@pytest.mark.parametrize("source_parts", [1, 2, 4])
def test_each_part_of_a_pool_is_filled_by_its_device(source_parts: int) -> None:
    source, cut = (PoolShape(num_blocks=6, block_bytes=64, rows=2, parts=parts) for parts in (source_parts, 2))
    own = tuple(torch.zeros(cut.part_bytes, dtype=torch.uint8) for _ in range(2))
    devices: list[HostDevice] = []

    def device_of(device: torch.device) -> HostDevice:
        devices.append(HostDevice())
        return devices[-1]

    with exported(source) as (pool, handles):
        transport = cuda_ipc_transport(own, cut, handles, source, device_of)
        assert (transport.name, transport.copy(b"", PAIRS)) == ("cuda_ipc", 3 * 64)
        assert transport.measure(1 << 20).bytes > 0
        assert [device.open_handles for device in devices] == [source_parts] * 2
        transport.close()
    assert [device.open_handles for device in devices] == [0, 0]
    whole = pool.view(source_parts, 6, 2, -1).permute(1, 2, 0, 3).reshape(6, 2, 2, 16)  # [block][row][own part]
    for rank, part in enumerate(own):
        assert part.view(6, 2, 16)[[1, 2, 4]].equal(whole[[4, 5, 0], :, rank])
        assert not part.view(6, 2, 16)[[0, 3, 5]].any()


def test_nothing_stays_open_where_a_later_part_cannot_be_reached() -> None:
    cut = PoolShape(num_blocks=6, block_bytes=64, rows=2, parts=2)
    own = tuple(torch.zeros(cut.part_bytes, dtype=torch.uint8) for _ in range(2))
    first = HostDevice()
    devices = iter([first])

    def device_of(device: torch.device) -> HostDevice:
        found = next(devices, None)
        if found is None:
            raise PeerUnreachable("no such GPU")
        return found

    with exported() as (_, handles), pytest.raises(PeerUnreachable):
        cuda_ipc_transport(own, cut, handles, SHAPE, device_of)
    assert first.open_handles == 0


def test_missing_pool_cannot_be_opened_and_opened_parts_are_closed() -> None:
    own, device = torch.zeros(6 * 64, dtype=torch.uint8), HostDevice()
    with exported() as (_, handles):
        gone = DeviceMemoryHandle(handles[0].handle.replace(b'"pid": ', b'"pid": 9'), 0, 64)
        with pytest.raises(PeerUnreachable):
            transport_to(own, device, [*handles, gone])
    assert device.open_handles == 0


def test_nothing_is_copied_if_any_block_is_out_of_range() -> None:
    own, device = torch.zeros(6 * 64, dtype=torch.uint8), HostDevice()
    with exported() as (_, handles):
        transport = transport_to(own, device, handles)
        with pytest.raises(BlockOutOfRange):
            transport.copy(b"", [*PAIRS, BlockPair(3, 6, 0)])
        transport.close()
    assert not own.any()
