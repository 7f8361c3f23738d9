"""The memory of a KV pool on CPU: its owner writes, peers of the same host may map it read-only. Knows no blocks."""

import fcntl
import mmap
import os
import sys

import torch

from kvtransfer.description import SharedMemoryHandle
from kvtransfer.errors import SharedMemoryUnavailable

F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h, kernel 5.1; Python 3.11 has no name for it
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
WRITE_SEALS = F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


class SharedPool:
    """Bytes in a sealed memfd. The kernel refuses every other writable map, every write and change of size.

    Where other processes of the owner are to write parts of it, they map them before `seal`: earlier maps stay
    writable.

    There is no name in /dev/shm that could be left behind: the memory goes with the last process that maps it.
    """

    def __init__(self, fd: int, mapping: mmap.mmap) -> None:
        status = os.fstat(fd)
        self._handle = SharedMemoryHandle(os.getpid(), fd, status.st_ino, status.st_size)
        self._tensor: torch.Tensor | None = torch.frombuffer(mapping, dtype=torch.uint8)

    @classmethod
    def create(cls, nbytes: int, sealed: bool = True) -> "SharedPool":
        """`nbytes` of zeros. Not `sealed`: only its size is, until `seal`.

        Raises SharedMemoryUnavailable where the system has no memfd or cannot seal it.
        """
        if nbytes < 1:
            raise ValueError(f"a pool needs at least one byte, got {nbytes}")
        if sys.platform != "linux":
            raise SharedMemoryUnavailable("memory that peers can read but not write needs Linux")
        try:
            fd = os.memfd_create("baton-kv-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise SharedMemoryUnavailable(f"memfd: {error.strerror}") from error
        try:
            os.ftruncate(fd, nbytes)
            mapping = mmap.mmap(fd, nbytes)
            # after the map: ours stays writable, every later one is refused
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS | (WRITE_SEALS if sealed else 0))
        except OSError as error:
            os.close(fd)
            raise SharedMemoryUnavailable(f"a sealed memfd of {nbytes} bytes: {error.strerror}") from error
        return cls(fd, mapping)

    def seal(self) -> None:
        """From now on no other writable map can be made. Raises SharedMemoryUnavailable where the kernel cannot."""
        if fcntl.fcntl(self._handle.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL:
            return
        try:
            fcntl.fcntl(self._handle.fd, fcntl.F_ADD_SEALS, WRITE_SEALS)
        except OSError as error:
            raise SharedMemoryUnavailable(f"the pool cannot be sealed: {error.strerror}") from error

    @property
    def tensor(self) -> torch.Tensor:
        """All of it: uint8, one dimension, writable. Keeps the memory alive for as long as it is referenced."""
        if self._tensor is None:
            raise ValueError("the pool is closed")
        return self._tensor

    @property
    def handle(self) -> SharedMemoryHandle:
        """The handle for a peer's `open_peer`. Good until `close`."""
        return self._handle

    def close(self) -> None:
        """No new peer can open the pool. The memory itself goes with the last tensor and the last peer's map."""
        if self._tensor is None:
            raise ValueError("the pool is closed already")
        # The map is not closed but let go: torch does not stop an unmap under a tensor that is still in use.
        self._tensor = None
        os.close(self._handle.fd)
