"""The few calls of CUDA's driver for sharing memory between processes, by ctypes: torch documents none.

Signatures as in cuda.h; the driver keeps old ones for ever, so that any libcuda.so.1 of version 12 or later will do.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

SUCCESS = 0
IPC_HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE
SOURCE_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
PREFER_OVERLAP_WITH_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


class CudaError(Exception):
    """A call of the driver failed."""


class Allocation(NamedTuple):
    base: int
    size_bytes: int


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * IPC_HANDLE_BYTES),)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class _CopySide(ctypes.Structure):
    """Half of CUDA_MEMCPY2D."""

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
    """CUDA_MEMCPY2D: 16 words in all."""

    _fields_ = (
        ("source", _CopySide),
        ("destination", _CopySide),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class CudaDriver:
    """Bound to one device, whose primary context, the one torch uses, is current during each call."""

    def __init__(self, device_index: int) -> None:
        """Raises: CudaError, also where there is no driver."""
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
        return hasattr(self._library, "cuMemcpyBatchAsync_v2")  # CUDA 13

    def allocation_of(self, address: int) -> Allocation:
        base, size = ctypes.c_ulonglong(), ctypes.c_size_t()
        with self._current():
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_ulonglong(address))
        return Allocation(base.value, size.value)

    def export(self, base: int) -> bytes:
        """CUipcMemHandle of a whole allocation."""
        handle = _IpcHandle()
        with self._current():
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_ulonglong(base))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        if len(handle) != IPC_HANDLE_BYTES:
            raise CudaError(f"a handle has {IPC_HANDLE_BYTES} bytes, not {len(handle)}")
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
        """`pitches`: of source and destination."""
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
        """In no order; needs `copies_batches` and a stream other than the default one."""
        count = len(sizes)
        addresses, lengths = ctypes.c_ulonglong * count, ctypes.c_size_t * count
        attributes = _CopyAttributes(source_order=SOURCE_IN_STREAM_ORDER, flags=PREFER_OVERLAP_WITH_COMPUTE)
        first = ctypes.c_size_t(0)  # the attributes hold from the first copy on
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
