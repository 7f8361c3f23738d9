"""What surrounds a driver's calls, over a device whose memory is the host's. The calls themselves: tests/gpu."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from baton.kvtransfer import cuda_ipc
from baton.kvtransfer.cuda_ipc import CudaIpcTransport, OwnPool, cuda_ipc_transport
from baton.kvtransfer.description import DeviceMemoryHandle
from baton.kvtransfer.shared_memory import SharedPool
from baton.kvtransfer.slices import PoolShape
from baton.kvtransfer.transport import BlockOutOfRange, BlockPair, CopyBroken, CopyStuck, PeerUnreachable
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


def test_blocks_come_from_where_the_pool_begins_in_what_was_exported() -> None:
    own, device = torch.zeros(6 * 64, dtype=torch.uint8), HostDevice()
    with exported() as (pool, handles):
        transport = transport_to(own, device, handles)
        assert transport.copy(b"", PAIRS) == 3 * 64
        assert transport.measure(1 << 20).bytes == 6 * 64
        transport.close()
    assert own.view(6, 64)[[1, 2, 4]].equal(pool.view(6, 64)[[4, 5, 0]])
    assert not own.view(6, 64)[[0, 3, 5]].any()
    assert device.open_handles == 0


def test_each_rank_of_the_source_has_memory_of_its_own() -> None:
    own, device = torch.zeros(6 * 64, dtype=torch.uint8), HostDevice()
    cut = PoolShape(num_blocks=6, block_bytes=64, rows=2, parts=2)
    with exported(cut) as (pool, handles):
        transport = transport_to(own, device, handles, cut)
        transport.copy(b"", PAIRS)
        transport.close()
    ranks = pool.view(2, 6, 2, 16)  # [part][block][row]
    assert own.view(6, 2, 2, 16)[1].equal(ranks[:, 4].transpose(0, 1))
    assert device.open_handles == 0


def test_a_rank_of_our_own_has_a_pool_that_begins_with_its_part() -> None:
    cut, device = PoolShape(num_blocks=6, block_bytes=64, rows=2, parts=2), HostDevice()
    own = torch.zeros(cut.part_bytes, dtype=torch.uint8)
    with exported() as (pool, handles):
        part = OwnPool(own.data_ptr(), own.numel(), first_part=1)
        transport = CudaIpcTransport(device, handles, part, SHAPE, cut, own_parts=[1])
        assert transport.copy(b"", PAIRS) == 3 * 32
        transport.close()
    assert own.view(6, 2, 16)[1].equal(pool.view(6, 2, 2, 16)[4, :, 1])


@pytest.mark.parametrize("source_parts", [1, 2, 4])
def test_each_part_of_our_own_pool_is_filled_by_its_own_device(source_parts: int) -> None:
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


def test_a_pool_that_is_gone_cannot_be_opened_and_what_was_is_closed() -> None:
    own, device = torch.zeros(6 * 64, dtype=torch.uint8), HostDevice()
    with exported() as (_, handles):
        gone = DeviceMemoryHandle(handles[0].handle.replace(b'"pid": ', b'"pid": 9'), 0, 64)
        with pytest.raises(PeerUnreachable):
            transport_to(own, device, [*handles, gone])
    assert device.open_handles == 0


def test_memory_is_closed_when_the_copy_under_way_has_ended() -> None:
    own = torch.zeros(6 * 64, dtype=torch.uint8)
    seen = []

    def close_in_between(index: int) -> None:
        if index == 1:
            transport.close()
            seen.append(device.open_handles)

    device = HostDevice(close_in_between)
    with exported() as (pool, handles):
        transport = transport_to(own, device, handles)
        transport.copy(b"", PAIRS)
        assert (seen, device.open_handles) == ([1], 0)
        assert own.view(6, 64)[4].equal(pool.view(6, 64)[0])
        with pytest.raises(PeerUnreachable):
            transport.copy(b"", PAIRS)


def test_nothing_is_copied_if_any_block_is_out_of_range() -> None:
    own, device = torch.zeros(6 * 64, dtype=torch.uint8), HostDevice()
    with exported() as (_, handles):
        transport = transport_to(own, device, handles)
        with pytest.raises(BlockOutOfRange):
            transport.copy(b"", [*PAIRS, BlockPair(3, 6, 0)])
        transport.close()
    assert not own.any()


EXPORTER = """
import sys
from baton.kvtransfer.shared_memory import SharedPool
from tests.fixtures.host_device import export
pool = SharedPool.create(6 * 64)
pool.tensor.fill_(7)
print(export(pool, 0, 6 * 64).handle.decode(), flush=True)
sys.stdin.read()
"""


def kill_before(process: "subprocess.Popen[str]", span: int) -> Callable[[int], None]:
    def kill(index: int) -> None:
        if index == span:
            process.kill()
            process.wait(10)

    return kill


def test_an_exporter_killed_in_the_middle_of_a_copy_leaves_the_reader_alive() -> None:
    own = torch.zeros(6 * 64, dtype=torch.uint8)
    process = subprocess.Popen([sys.executable, "-c", EXPORTER], stdin=-1, stdout=-1, text=True)
    with process:
        assert process.stdout is not None
        handle = DeviceMemoryHandle(process.stdout.readline().strip().encode(), 0, 6 * 64)
        device = HostDevice(kill_before(process, 1))
        transport = transport_to(own, device, [handle])
        transport.copy(b"", PAIRS)  # stale: nobody is left to confirm it
        assert process.returncode == -9
        transport.close()
        assert device.open_handles == 0
        with pytest.raises(PeerUnreachable):
            transport_to(own, device, [handle])


def test_a_copy_that_the_gpu_does_not_end_is_a_broken_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    class NeverDone:
        def record(self, stream: object) -> None:
            assert stream is None

        def query(self) -> bool:
            return False

    monkeypatch.setattr(torch.cuda, "Event", NeverDone)
    monkeypatch.setattr(cuda_ipc, "COPY_TIMEOUT_S", 0.0)
    device = object.__new__(cuda_ipc.CudaDevice)  # without its driver
    device._device, device._stream = torch.device("cuda", 0), None  # type: ignore[assignment]
    monkeypatch.setattr(device, "_start", lambda spans: None)
    with pytest.raises(CopyStuck, match="copy on cuda:0") as stuck:
        device.copy([])
    assert isinstance(stuck.value, CopyBroken)
