"""Whether the cores of a worker compute now, shared by the workers of one machine: a byte in a file that both map.

A worker writes its own byte alone. A worker that reads it may use those cores meanwhile, behind whatever else runs
there (kernels/native/threads.py).
"""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt


class CoreUse:
    """Of the cores of this process. Nothing is left to close: the mapping goes with the object."""

    def __init__(self, file: Path) -> None:
        """Raises: OSError where the file cannot be made."""
        self._byte = _mapped(file, mmap.ACCESS_WRITE)
        self.mark(False)

    def mark(self, computing: bool) -> None:
        self._byte[0] = computing


@dataclass(frozen=True, slots=True)
class SpareCores:
    """Of another process. `in_use`: its byte, `[1]`, mapped for reading alone."""

    cores: frozenset[int]
    in_use: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, cores: frozenset[int], file: Path) -> "SpareCores":
        """Raises: OSError. The first process makes the file."""
        return cls(cores, np.frombuffer(_mapped(file, mmap.ACCESS_READ), np.uint8))


def _mapped(file: Path, access: int) -> mmap.mmap:
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_size == 0:
            os.ftruncate(descriptor, 1)
        return mmap.mmap(descriptor, 1, access=access)
    finally:
        os.close(descriptor)
