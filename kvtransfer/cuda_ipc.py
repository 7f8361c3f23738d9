"""Pools on GPUs shared by CUDA's inter-process handles: the part that needs a GPU, and nothing else."""

import logging
import time
from collections.abc import Sequence

import torch

from kvtransfer.cuda_driver import CudaDriver, CudaError
from kvtransfer.description import DeviceMemoryHandle
from kvtransfer.device_memory import AddressSpan
from kvtransfer.errors import CopyBroken, PeerUnreachable, SharedMemoryUnavailable

logger = logging.getLogger(__name__)
COPY_TIMEOUT_S = 30.0
POLL_S = 20e-6


def export_pool(pool: torch.Tensor) -> DeviceMemoryHandle:
    """The handle for a peer to open `pool`, uint8 in one dimension on a GPU. Good until its memory is freed.

    Raises: SharedMemoryUnavailable; memory of torch's expandable segments is such a case.
    """
    try:
        driver = CudaDriver(_index(pool.device))
        allocation = driver.allocation_of(pool.data_ptr())
        handle = driver.export(allocation.base)
    except CudaError as error:
        raise SharedMemoryUnavailable(f"the pool cannot be exported: {error}") from error
    return DeviceMemoryHandle(handle, pool.data_ptr() - allocation.base, pool.numel())


def open_part(handle: DeviceMemoryHandle, device: torch.device) -> torch.Tensor:
    """A pool that `export_pool` exported in another process, to be written by this one too: so a worker's ranks
    share out its pool. Good for as long as that process lives. Raises: PeerUnreachable.
    """
    try:
        address = CudaDriver(_index(device)).open(handle.handle) + handle.offset_bytes
    except CudaError as error:
        raise PeerUnreachable(f"the leader's memory cannot be opened: {error}") from error
    return torch.as_tensor(_Foreign(address, handle.size_bytes), device=device)


class _Foreign:
    """Memory of a GPU as torch takes it from other libraries."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class CudaDevice:
    """A `Device`. Copies on a stream of its own, in one batch where the driver can (CUDA 13), else one by one."""

    def __init__(self, device: torch.device) -> None:
        """Raises: PeerUnreachable."""
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
            logger.warning("memory of a peer could not be closed: %s", error)

    def scratch(self, nbytes: int) -> int:
        self._scratch = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._scratch.data_ptr()

    def copy(self, spans: Sequence[AddressSpan]) -> None:
        """Raises: CopyBroken; RuntimeError where the GPU does not come to an end, since pages cannot be freed then."""
        failed: CudaError | None = None
        try:
            self._start(spans)
        except CudaError as error:
            failed = error
        self._wait()  # also for copies that had been started before one failed
        if failed is not None:
            raise CopyBroken(f"copying from the peer's memory: {failed}") from failed

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
                logger.warning("batched copies failed, copying one by one from now on: %s", error)
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
        raise RuntimeError(f"a copy on {self._device} has not ended within {COPY_TIMEOUT_S:g} s")


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
