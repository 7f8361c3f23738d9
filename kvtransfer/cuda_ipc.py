"""KV copies between GPU pools of one host, over CUDA's inter-process memory handles."""

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from baton.kvtransfer.description import DeviceMemoryHandle
from baton.kvtransfer.slices import EachPart, MappedTransport, PoolShape, Span
from baton.kvtransfer.transport import (
    CopyBroken,
    CopyStuck,
    LinkRate,
    PeerUnreachable,
    SharedMemoryUnavailable,
    Transport,
)

logger = logging.getLogger(__name__)

SUCCESS = 0
IPC_HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE
SOURCE_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
PREFER_OVERLAP_WITH_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
COPY_TIMEOUT_S = 30.0
POLL_S = 20e-6


class CudaError(Exception):
    """Error that a call of the CUDA driver returned."""


class Allocation(NamedTuple):
    base: int
    size_bytes: int


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * IPC_HANDLE_BYTES),)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    """ctypes mirror of CUmemcpyAttributes."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class _CopySide(ctypes.Structure):
    """Fields of CUDA_MEMCPY2D that describe its source, or its destination."""

    _fields_ = (
        ("x", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("type", ctypes.c_uint),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_ulonglong),
        ("array", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
    )


class _Copy2D(ctypes.Structure):
    """ctypes mirror of CUDA_MEMCPY2D, 16 words."""

    _fields_ = (
        ("source", _CopySide),
        ("destination", _CopySide),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class CudaDriver:
    """CUDA driver's calls for memory shared between processes, by ctypes, since torch has no public API for them.

    Bound to one device, whose primary context (the one of torch) is current during each call. Signatures follow cuda.h.
    The driver keeps old functions, so any libcuda.so.1 of CUDA 12 or later works.
    """

    def __init__(self, device_index: int) -> None:
        """Load the driver. Raises: CudaError, also if no driver is installed."""
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(str(error)) from error
        self._call("cuInit", ctypes.c_uint(0))
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(device_index))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    @property
    def copies_batches(self) -> bool:
        return hasattr(self._library, "cuMemcpyBatchAsync_v2")  # in CUDA 13 and later

    def allocation_of(self, address: int) -> Allocation:
        base, size = ctypes.c_ulonglong(), ctypes.c_size_t()
        with self._current():
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_ulonglong(address))
        return Allocation(base.value, size.value)

    def export(self, base: int) -> bytes:
        """Return the CUipcMemHandle of a complete allocation. Another process opens the allocation with this handle."""
        handle = _IpcHandle()
        with self._current():
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_ulonglong(base))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        if len(handle) != IPC_HANDLE_BYTES:
            raise CudaError(f"IPC handle must have {IPC_HANDLE_BYTES} bytes, not {len(handle)}")
        address = ctypes.c_ulonglong()
        with self._current():
            self._call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(address),
                _IpcHandle.from_buffer_copy(handle),
                ctypes.c_uint(LAZY_PEER_ACCESS),
            )
        return address.value

    def close(self, address: int) -> None:
        with self._current():
            self._call("cuIpcCloseMemHandle", ctypes.c_ulonglong(address))

    def copy(self, source: int, destination: int, nbytes: int, stream: int) -> None:
        with self._current():
            self._call(
                "cuMemcpyDtoDAsync_v2",
                ctypes.c_ulonglong(destination),
                ctypes.c_ulonglong(source),
                ctypes.c_size_t(nbytes),
                ctypes.c_void_p(stream),
            )

    def copy_rows(
        self, source: int, destination: int, rows: int, width: int, pitches: tuple[int, int], stream: int
    ) -> None:
        """Copy rows. `pitches`: bytes from the start of a row to the start of the next, in source and destination."""
        source_pitch, destination_pitch = pitches
        copy = _Copy2D(
            _CopySide(type=DEVICE_MEMORY, device=source, pitch=source_pitch),
            _CopySide(type=DEVICE_MEMORY, device=destination, pitch=destination_pitch),
            width,
            rows,
        )
        with self._current():
            self._call("cuMemcpy2DAsync_v2", ctypes.byref(copy), ctypes.c_void_p(stream))

    def copy_batch(
        self, sources: Sequence[int], destinations: Sequence[int], sizes: Sequence[int], stream: int
    ) -> None:
        """Copy all ranges, in any order. Requires `copies_batches` and a stream other than the default one."""
        count = len(sizes)
        addresses, lengths = ctypes.c_ulonglong * count, ctypes.c_size_t * count
        attributes = _CopyAttributes(source_order=SOURCE_IN_STREAM_ORDER, flags=PREFER_OVERLAP_WITH_COMPUTE)
        first = ctypes.c_size_t(0)  # the attributes apply to all copies from this index on
        with self._current():
            self._call(
                "cuMemcpyBatchAsync_v2",
                addresses(*destinations),
                addresses(*sources),
                lengths(*sizes),
                ctypes.c_size_t(count),
                ctypes.byref(attributes),
                ctypes.byref(first),
                ctypes.c_size_t(1),
                ctypes.c_void_p(stream),
            )

    @contextmanager
    def _current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != SUCCESS:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'unknown').decode()} ({status})")


class AddressSpan(NamedTuple):
    """Copy, as described by a `Span`, but with device addresses as `source` and `destination` instead of offsets."""

    source: int
    destination: int
    rows: int
    width: int
    source_pitch: int
    destination_pitch: int


class Device(Protocol):
    """GPU that copies from mapped memory. Only one thread at a time may call it; any thread may call `close_handle`."""

    def open_handle(self, handle: bytes) -> int:
        """Map memory that another process exported; return its address. Raises: PeerUnreachable."""

    def close_handle(self, address: int) -> None:
        """Unmap memory that `open_handle` mapped. No copy may be reading it."""

    def copy(self, spans: Sequence[AddressSpan]) -> None:
        """Copy spans and wait for the device.

        Raises: CopyBroken if a copy failed and no copy is running any more; CopyStuck if a copy is still running.
        """

    def scratch(self, nbytes: int) -> int:
        """Return the address of `nbytes` bytes of this process to copy into, valid until the next call of `scratch`."""


@dataclass(frozen=True, slots=True)
class OwnPool:
    address: int
    size_bytes: int
    first_part: int = 0  # index of the part that begins at `address`


class DeviceMemory:
    """A `MappedMemory` on GPUs. Maps each part of the peer's pool once; `close` unmaps it, after a running copy.

    Devices have no read-only mapping: only this code prevents writes to the mapped memory. No queued work on the device
    uses the destination blocks, since a block is freed only after all work that uses this block has finished.
    """

    def __init__(
        self,
        device: Device,
        handles: Sequence[DeviceMemoryHandle],
        source: PoolShape,
        own: OwnPool,
        own_shape: PoolShape,
    ) -> None:
        """Open the peer's pool. Raises: PeerUnreachable."""
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
        """Copy spans of the peer's pool into this one. Raises: PeerUnreachable if closed; CopyBroken."""
        self._run([self._addressed(span) for span in spans])

    def measure(self, nbytes: int) -> LinkRate:
        size = min(nbytes, self._part_bytes)
        span = AddressSpan(self._parts[0], self._device.scratch(size), 1, size, size, size)
        self._run([span])  # warm-up: the first copy between two devices also connects the devices
        started = time.monotonic()
        self._run([span])
        return LinkRate(size, time.monotonic() - started)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                raise ValueError("the peer's memory is closed already")
            self._closed = True
            if self._copying:
                return  # a copy is running: its thread unmaps the memory afterwards
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
    """Transport between workers whose pools are on GPUs of one host, possibly on the same GPU."""

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
        """Open the peer's pools. Raises: PeerUnreachable."""
        super().__init__(DeviceMemory(device, handles, source, own_pool, own), source, own, own_parts)


def cuda_ipc_transport(
    parts: Sequence[torch.Tensor],
    own: PoolShape,
    handles: Sequence[DeviceMemoryHandle],
    source: PoolShape,
    device_of: Callable[[torch.device], Device],
) -> Transport:
    """Create a transport that copies into each of this pool's `parts` on the part's device.

    Raises: PeerUnreachable, after closing all memory of the peer that was already opened.
    """
    with ExitStack() as undo:
        transports: list[Transport] = []
        for rank, part in enumerate(parts):
            pool = OwnPool(part.data_ptr(), part.numel(), first_part=rank)
            transport = CudaIpcTransport(device_of(part.device), handles, pool, source, own, own_parts=[rank])
            undo.callback(transport.close)
            transports.append(transport)
        undo.pop_all()
    return transports[0] if len(transports) == 1 else EachPart(transports)


def export_pool(pool: torch.Tensor) -> DeviceMemoryHandle:
    """Return the handle with which a peer opens `pool`, which is uint8, one-dimensional and on a GPU.

    The handle is valid while the pool exists.

    Raises: SharedMemoryUnavailable, for example for torch's expandable segments.
    """
    try:
        driver = CudaDriver(_index(pool.device))
        allocation = driver.allocation_of(pool.data_ptr())
        handle = driver.export(allocation.base)
    except CudaError as error:
        raise SharedMemoryUnavailable(f"the pool cannot be exported: {error}") from error
    return DeviceMemoryHandle(handle, pool.data_ptr() - allocation.base, pool.numel())


def open_part(handle: DeviceMemoryHandle, device: torch.device) -> torch.Tensor:
    """Open a pool that another rank of this worker exported with `export_pool`, for reading and writing.

    The tensor is valid while that process lives. Raises: PeerUnreachable.
    """
    try:
        address = CudaDriver(_index(device)).open(handle.handle) + handle.offset_bytes
    except CudaError as error:
        raise PeerUnreachable(f"memory of the leading rank cannot be opened: {error}") from error
    return torch.as_tensor(_Foreign(address, handle.size_bytes), device=device)


class _Foreign:
    """GPU memory of another process, with the `__cuda_array_interface__` from which torch creates a tensor."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class CudaDevice:
    """A `Device` that copies on its own stream: with CUDA 13 all spans in one batch, with older versions one by one."""

    def __init__(self, device: torch.device) -> None:
        """Load the driver. Raises: PeerUnreachable."""
        self._device = device
        try:
            self._driver = CudaDriver(_index(device))
        except CudaError as error:
            raise PeerUnreachable(str(error)) from error
        self._stream = torch.cuda.Stream(device)
        self._batches = self._driver.copies_batches
        self._scratch: torch.Tensor | None = None

    def open_handle(self, handle: bytes) -> int:
        try:
            return self._driver.open(handle)
        except CudaError as error:
            raise PeerUnreachable(f"the peer's memory cannot be opened: {error}") from error

    def close_handle(self, address: int) -> None:
        try:
            self._driver.close(address)
        except CudaError as error:
            logger.warning("memory of a peer could not be unmapped: %s; it stays mapped in this process", error)

    def scratch(self, nbytes: int) -> int:
        self._scratch = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._scratch.data_ptr()

    def copy(self, spans: Sequence[AddressSpan]) -> None:
        """Copy spans. Raises: CopyBroken; its subclass CopyStuck if the GPU does not finish."""
        failed: CudaError | None = None
        try:
            self._start(spans)
        except CudaError as error:
            failed = error
        self._wait()  # also after an error, since earlier copies may still be running
        if failed is not None:
            raise CopyBroken(f"copy from the peer's memory failed: {failed}") from failed

    def _start(self, spans: Sequence[AddressSpan]) -> None:
        stream = self._stream.cuda_stream
        whole = [span for span in spans if span.rows == 1]
        for span in spans:
            if span.rows > 1:
                pitches = (span.source_pitch, span.destination_pitch)
                self._driver.copy_rows(span.source, span.destination, span.rows, span.width, pitches, stream)
        if len(whole) > 1 and self._batches:
            try:
                self._driver.copy_batch(
                    [span.source for span in whole],
                    [span.destination for span in whole],
                    [span.width for span in whole],
                    stream,
                )
                return
            except CudaError as error:
                logger.warning("batched GPU copies failed: %s; copying one by one from now on", error)
                self._batches = False
        for span in whole:
            self._driver.copy(span.source, span.destination, span.width, stream)

    def _wait(self) -> None:
        done = torch.cuda.Event()
        try:
            done.record(self._stream)
            deadline = time.monotonic() + COPY_TIMEOUT_S
            while not done.query():
                if time.monotonic() > deadline:
                    break
                time.sleep(POLL_S)
            else:
                return
        except RuntimeError as error:
            raise CopyBroken(f"the GPU failed: {error}") from error
        raise CopyStuck(f"copy on {self._device} did not finish within {COPY_TIMEOUT_S:g} s")


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
