"""A peer's pool in the memory of a device that both processes can address, through the device's driver."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from kvtransfer.description import DeviceMemoryHandle
from kvtransfer.errors import PeerUnreachable
from kvtransfer.mapped import MappedTransport
from kvtransfer.parts import EachPart
from kvtransfer.slices import PoolShape, Span
from kvtransfer.transport import LinkRate, Transport


class AddressSpan(NamedTuple):
    """As `Span`, between addresses of the device."""

    source: int
    destination: int
    rows: int
    width: int
    source_pitch: int
    destination_pitch: int


class Device(Protocol):
    """The interface of a driver. One thread at a time, but for `close_handle`."""

    def open_handle(self, handle: bytes) -> int:
        """Where memory that another process exported lies for us. Raises: PeerUnreachable."""

    def close_handle(self, address: int) -> None:
        """No copy reads it any more."""

    def copy(self, spans: Sequence[AddressSpan]) -> None:
        """Returns when the device reports that they have ended. Raises: CopyBroken, when none is under way any more."""

    def scratch(self, nbytes: int) -> int:
        """Address of memory of our own to copy into, good until the next call."""


@dataclass(frozen=True, slots=True)
class OwnPool:
    address: int
    size_bytes: int
    first_part: int = 0  # the part that begins at `address`


class DeviceMemory:
    """A `MappedMemory`: opens each part of the peer's pool once, and closes it when no copy is reading.

    Only our own code keeps us from writing the opened memory: devices have no read-only mapping. Blocks that are
    copied into must be idle, on the device too: a block is freed only after the work that used it has ended.
    """

    def __init__(
        self,
        device: Device,
        handles: Sequence[DeviceMemoryHandle],
        source: PoolShape,
        own: OwnPool,
        own_shape: PoolShape,
    ) -> None:
        """Raises: PeerUnreachable."""
        self._device = device
        self._own_base = own.address - own.first_part * own_shape.part_bytes
        self._part_bytes = source.part_bytes
        self._lock = threading.Lock()
        self._copying = self._closed = False
        self._opened: list[int] = []
        self._parts: list[int] = []
        try:
            for part in handles:
                self._opened.append(device.open_handle(part.handle))
                self._parts.append(self._opened[-1] + part.offset_bytes)
        except PeerUnreachable:
            self._let_go()
            raise

    def copy(self, spans: Sequence[Span]) -> None:
        """Raises: PeerUnreachable (closed), CopyBroken."""
        self._run([self._addressed(span) for span in spans])

    def measure(self, nbytes: int) -> LinkRate:
        size = min(nbytes, self._part_bytes)
        span = AddressSpan(self._parts[0], self._device.scratch(size), 1, size, size, size)
        self._run([span])  # does the set-up of the first copy between two devices
        started = time.monotonic()
        self._run([span])
        return LinkRate(size, time.monotonic() - started)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                raise ValueError("the peer's memory is closed already")
            self._closed = True
            if self._copying:
                return  # the running copy lets go at its end
        self._let_go()

    def _addressed(self, span: Span) -> AddressSpan:
        part, offset = divmod(span.source, self._part_bytes)
        return AddressSpan(self._parts[part] + offset, self._own_base + span.destination, *span[2:])

    def _run(self, spans: Sequence[AddressSpan]) -> None:
        with self._lock:
            if self._closed:
                raise PeerUnreachable("the link to the peer was closed")
            self._copying = True
        try:
            self._device.copy(spans)
        finally:
            with self._lock:
                self._copying = False
                last = self._closed
            if last:
                self._let_go()

    def _let_go(self) -> None:
        while self._opened:
            self._device.close_handle(self._opened.pop())


class CudaIpcTransport(MappedTransport):
    """Between workers on the GPUs of one host, also two on one GPU."""

    name = "cuda_ipc"

    def __init__(
        self,
        device: Device,
        handles: Sequence[DeviceMemoryHandle],
        own_pool: OwnPool,
        source: PoolShape,
        own: PoolShape,
        own_parts: Sequence[int] | None = None,
    ) -> None:
        """Raises: PeerUnreachable."""
        super().__init__(DeviceMemory(device, handles, source, own_pool, own), source, own, own_parts)


def cuda_ipc_transport(
    parts: Sequence[torch.Tensor],
    own: PoolShape,
    handles: Sequence[DeviceMemoryHandle],
    source: PoolShape,
    device_of: Callable[[torch.device], Device],
) -> Transport:
    """Into each of our `parts`, by the device that it lies on. Raises: PeerUnreachable, and nothing stays open."""
    with ExitStack() as undo:
        transports: list[Transport] = []
        for rank, part in enumerate(parts):
            pool = OwnPool(part.data_ptr(), part.numel(), first_part=rank)
            transport = CudaIpcTransport(device_of(part.device), handles, pool, source, own, own_parts=[rank])
            undo.callback(transport.close)
            transports.append(transport)
        undo.pop_all()
    return transports[0] if len(transports) == 1 else EachPart(transports)
