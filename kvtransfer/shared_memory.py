"""KV copies in host memory: the owner writes its pool, peers on the same host map it read-only and copy."""

import ctypes
import fcntl
import logging
import mmap
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from baton.kvtransfer.description import SharedMemoryHandle
from baton.kvtransfer.slices import MappedTransport, PoolShape, Span
from baton.kvtransfer.transport import LinkRate, PeerUnreachable, SharedMemoryUnavailable

MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23  # linux/mman.h, kernel 5.14; absent in Python

logger = logging.getLogger(__name__)


def back(storage: torch.Tensor) -> None:
    """Allocate all memory pages of a pool in advance, without holding the GIL. Takes up to 1 s per GiB.

    Otherwise decode steps would be slower: the first write to a page takes microseconds, and each token writes to
    hundreds of pages. Call this before the worker serves, because no other thread can map memory during the call. If
    the kernel refuses, pages are allocated at first use. `storage`: uint8, one-dimensional, on the CPU; its content is
    kept.
    """
    _populate(storage.data_ptr(), storage.numel(), MADV_POPULATE_WRITE)


def map_in(memory: npt.NDArray[np.uint8]) -> None:
    """Fill this process's page table for memory of another process, before it is read. Takes 0.1 s per GiB."""
    _populate(memory.ctypes.data, memory.size, MADV_POPULATE_READ)


def _populate(address: int, nbytes: int, advice: int) -> None:
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if length > 0 and madvise(first, length, advice) != 0:
        logger.info(
            "pool not allocated in advance: madvise: %s; memory is allocated at first use",
            os.strerror(ctypes.get_errno()),
        )


F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h, kernel 5.1; absent in Python 3.11
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
WRITE_SEALS = F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


class SharedPool:
    """Pool in a sealed memfd: the kernel refuses further writable maps, writes and changes of size.

    Maps from before `seal` stay writable. The owner's other ranks create such maps, to write their parts of the pool.
    The pool has no name in /dev/shm that a crash could leave behind: its memory is freed with the last process that
    maps it.
    """

    def __init__(self, fd: int, mapping: mmap.mmap) -> None:
        status = os.fstat(fd)
        self._handle = SharedMemoryHandle(os.getpid(), fd, status.st_ino, status.st_size)
        self._tensor: torch.Tensor | None = torch.frombuffer(mapping, dtype=torch.uint8)

    @classmethod
    def create(cls, nbytes: int, sealed: bool = True, pool_id: bytes = b"") -> "SharedPool":
        """Create a pool of `nbytes` zeros, which peers identify by `pool_id`.

        `sealed`: forbid further writable maps now, instead of at `seal`. The size is sealed in either case.

        Raises: SharedMemoryUnavailable if the system has no memfd or cannot seal it.
        """
        if nbytes < 1:
            raise ValueError(f"a pool needs at least one byte, got {nbytes}")
        if sys.platform != "linux":
            raise SharedMemoryUnavailable("shared memory that peers can only read needs Linux")
        try:
            fd = os.memfd_create(_name(pool_id), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise SharedMemoryUnavailable(f"memfd: {error.strerror}") from error
        try:
            os.ftruncate(fd, nbytes)
            mapping = mmap.mmap(fd, nbytes)
            # Seal after mapping: this map stays writable, and later writable maps are refused.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS | (WRITE_SEALS if sealed else 0))
        except OSError as error:
            os.close(fd)
            raise SharedMemoryUnavailable(f"no sealed memfd of {nbytes} bytes: {error.strerror}") from error
        return cls(fd, mapping)

    def seal(self) -> None:
        """Forbid further writable maps. Raises: SharedMemoryUnavailable if the kernel refuses the seal."""
        if fcntl.fcntl(self._handle.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL:
            return
        try:
            fcntl.fcntl(self._handle.fd, fcntl.F_ADD_SEALS, WRITE_SEALS)
        except OSError as error:
            raise SharedMemoryUnavailable(f"the pool cannot be sealed: {error.strerror}") from error

    @property
    def tensor(self) -> torch.Tensor:
        """Return the complete pool, uint8, one-dimensional, writable. The tensor keeps the memory alive."""
        if self._tensor is None:
            raise ValueError("the pool is closed")
        return self._tensor

    @property
    def handle(self) -> SharedMemoryHandle:
        """Handle with which a peer opens this pool by `open_peer`, valid until `close`."""
        return self._handle

    def close(self) -> None:
        """Make the handle invalid. The memory is freed with the last tensor and the last map of a peer."""
        if self._tensor is None:
            raise ValueError("the pool is closed already")
        # Drop the reference instead of unmapping: torch would not prevent unmapping the memory of a tensor in use.
        self._tensor = None
        os.close(self._handle.fd)


class PeerMemory:
    """Read-only map of a peer's pool, as a numpy array, because torch has no read-only tensors.

    The map survives the owner's process. Blocks that are read after the owner's death may be stale, since no process
    confirms them.
    """

    def __init__(self, array: npt.NDArray[np.uint8]) -> None:
        self._array: npt.NDArray[np.uint8] | None = array

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """Return the complete pool, uint8, one-dimensional, read-only. The array keeps the map alive.

        Raises: PeerUnreachable after `close`, which may be called while copies are queued.
        """
        if self._array is None:
            raise PeerUnreachable("the link to the peer was closed")
        return self._array

    def close(self) -> None:
        """Forbid further copies. The memory is unmapped when no copy uses its array any more."""
        if self._array is None:
            raise ValueError("the peer's memory is closed already")
        self._array = None


def open_peer(handle: SharedMemoryHandle, pool_id: bytes = b"") -> PeerMemory:
    """Map the pool of `handle`. Raises: PeerUnreachable; the caller must then use another transport.

    `pool_id` distinguishes the pools of cloned virtual machines, whose handles and host ids may be equal.
    """
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        # Non-blocking: the descriptor may belong to a pipe by now, and opening a pipe would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise PeerUnreachable(f"{path}: {error.strerror}") from error
    try:
        _check_same_file(fd, handle, pool_id)
        mapping = mmap.mmap(fd, handle.size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except OSError as error:
        raise PeerUnreachable(f"{path}: {error.strerror}") from error
    finally:
        os.close(fd)
    return PeerMemory(np.frombuffer(mapping, dtype=np.uint8))


def _name(pool_id: bytes) -> str:
    return f"baton-kv-pool-{pool_id.hex()}" if pool_id else "baton-kv-pool"


def _check_same_file(fd: int, handle: SharedMemoryHandle, pool_id: bytes) -> None:
    """Check that the file is the announced pool: the owner may have died, and its pid may have been reused.

    Raises: PeerUnreachable, OSError.
    """
    status = os.fstat(fd)
    name = Path(f"/proc/self/fd/{fd}").readlink().name.removeprefix("memfd:").removesuffix(" (deleted)")
    is_named = not pool_id or name in (_name(pool_id), _name(b""))  # owners of release 0.1.0 have no id
    if (status.st_ino, status.st_size) != (handle.inode, handle.size_bytes) or not is_named:
        raise PeerUnreachable(f"/proc/{handle.pid}/fd/{handle.fd} is not the announced pool")
    # The seal must prevent shrinking: reading after the end of a file that has shrunk kills this process (SIGBUS).
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise PeerUnreachable(f"/proc/{handle.pid}/fd/{handle.fd} is not sealed")


MAPPED_IN_BYTES = 2 << 30
"""Bytes of a peer's pool that are mapped before the first copy, in 0.2 s. Copies of later bytes are 20 % slower."""


class HostMemory:
    """A `MappedMemory` in host memory. Owns and closes `peer`. `pool`: this worker's pool, uint8, one-dimensional.

    Copies use numpy, which releases the GIL like torch, but copies on the calling thread instead of compute threads.
    """

    def __init__(self, peer: PeerMemory, pool: torch.Tensor) -> None:
        self._peer = peer
        self._pool = pool.numpy()

    def copy(self, spans: Sequence[Span]) -> None:
        """Copy spans. Raises: PeerUnreachable after `close`."""
        source = self._peer.array
        for span in spans:
            np.copyto(
                _rows(self._pool, span.destination, span.rows, span.width, span.destination_pitch),
                _rows(source, span.source, span.rows, span.width, span.source_pitch),
            )

    def measure(self, nbytes: int) -> LinkRate:
        map_in(self._peer.array[:MAPPED_IN_BYTES])
        source = self._peer.array[:nbytes]
        scratch = np.empty_like(source)
        np.copyto(scratch, source)  # warm-up: touches the pages, which takes longer than the copy
        started = time.monotonic()
        np.copyto(scratch, source)
        return LinkRate(source.size, time.monotonic() - started)

    def close(self) -> None:
        self._peer.close()


class SharedMemoryTransport(MappedTransport):
    """Transport between workers on the CPUs of one host."""

    name = "shared_memory"

    def __init__(self, peer: PeerMemory, pool: torch.Tensor, source: PoolShape, own: PoolShape) -> None:
        super().__init__(HostMemory(peer, pool), source, own)


def _rows(memory: npt.NDArray[np.uint8], offset: int, rows: int, width: int, pitch: int) -> npt.NDArray[np.uint8]:
    """Return a view of the rows. Raises: ValueError if they exceed `memory`."""
    return np.ndarray((rows, width), np.uint8, memory, offset, (pitch, 1))
