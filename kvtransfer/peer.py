"""The pool of another process of this host, mapped so that it can only be read."""

import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt

from kvtransfer.description import SharedMemoryHandle
from kvtransfer.errors import PeerUnreachable


class PeerMemory:
    """A read-only map, numpy because torch knows no read-only tensor.

    It outlives its owner's process: a read is stale then, and no owner is left to confirm it.
    """

    def __init__(self, array: npt.NDArray[np.uint8]) -> None:
        self._array: npt.NDArray[np.uint8] | None = array

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """All of it: uint8, one dimension, not writable. Keeps the map alive for as long as it is referenced.

        Raises PeerUnreachable once closed, which may happen while copies wait for their turn.
        """
        if self._array is None:
            raise PeerUnreachable("the link to the peer was closed")
        return self._array

    def close(self) -> None:
        """Unmaps as soon as no copy is reading."""
        if self._array is None:
            raise ValueError("the peer's memory is closed already")
        self._array = None


def open_peer(handle: SharedMemoryHandle) -> PeerMemory:
    """Maps the pool that `handle` names. Raises PeerUnreachable: another transport has to be used."""
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        # Non-blocking: were this not a memfd but a pipe, opening it would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise PeerUnreachable(f"{path}: {error.strerror}") from error
    try:
        _check_same_file(fd, handle)
        mapping = mmap.mmap(fd, handle.size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except OSError as error:
        raise PeerUnreachable(f"{path}: {error.strerror}") from error
    finally:
        os.close(fd)
    return PeerMemory(np.frombuffer(mapping, dtype=np.uint8))


def _check_same_file(fd: int, handle: SharedMemoryHandle) -> None:
    """The process may have died and its number been given to another one. Raises PeerUnreachable, OSError."""
    status = os.fstat(fd)
    if (status.st_ino, status.st_size) != (handle.inode, handle.size_bytes):
        raise PeerUnreachable(f"/proc/{handle.pid}/fd/{handle.fd} is not the pool that was announced")
    # Reading past the end of a file that shrank would kill this process (SIGBUS).
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise PeerUnreachable(f"/proc/{handle.pid}/fd/{handle.fd} is not sealed")
