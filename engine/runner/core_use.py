"""Cores that a worker lends to another worker of its machine, through mapped files.

The owner's file says whether it computes on its cores. While it does not, the borrower may compute there at the lowest
priority (kernels/native/threads.cpp). The borrower's file says until when it wants the cores; the owner then computes
its answers no sooner than their TBT objectives demand. Each worker writes only its own file.
"""

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

GAIN = 0.75  # share of the time that an owner lends its cores, with a step of a quarter of the TBT objective
WANTED_S = 1.0  # time for which cores are wanted: more than a step of prompts, so that each step renews it


class CoreUse:
    """A worker's use of its own cores. The mappings are freed with the object."""

    def __init__(self, file: Path) -> None:
        """Map the files. Raises: OSError if they cannot be created."""
        self._in_use = _mapped(file, np.uint8, mmap.ACCESS_WRITE)
        self._wanted_until_s = _mapped(_wanted(file), np.float64, mmap.ACCESS_READ)
        self.mark(False)

    def mark(self, computing: bool) -> None:
        """Record whether this worker computes on its cores."""
        self._in_use[0] = computing

    @property
    def is_wanted(self) -> bool:
        """Return whether another worker wants the cores now."""
        return bool(time.monotonic() < self._wanted_until_s[0])


@dataclass(frozen=True, slots=True)
class SpareCores:
    """Cores of another worker, which this one uses while they are idle. `in_use`: not 0 while their owner computes."""

    cores: frozenset[int]
    in_use: npt.NDArray[np.uint8]
    wanted_until_s: npt.NDArray[np.float64]  # on the monotonic clock

    @classmethod
    def of(cls, cores: frozenset[int], file: Path) -> "SpareCores":
        """Map the files of the cores' owner, creating them if needed. Raises: OSError."""
        wanted = _mapped(_wanted(file), np.float64, mmap.ACCESS_WRITE)
        return cls(cores, _mapped(file, np.uint8, mmap.ACCESS_READ), wanted)

    def gain(self, own: frozenset[int] | None) -> float:
        """Return by how much faster this worker is with the cores while they are wanted, as a fraction. `own`: its own
        cores; None: all of the machine, so that there is nothing to gain.
        """
        return GAIN * len(self.cores) / len(own) if own else 0.0

    def want(self, wanted: bool) -> None:
        """Record whether this worker wants the cores, for WANTED_S."""
        self.wanted_until_s[0] = time.monotonic() + WANTED_S if wanted else 0.0


def _wanted(file: Path) -> Path:
    """Return the borrower's file. `file`: the owner's."""
    return file.with_name(f"{file.name}.wanted")


def _mapped(file: Path, kind: type[np.generic], access: int) -> "npt.NDArray[Any]":
    """Map a file with one number, 0 in a new file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    size = np.dtype(kind).itemsize
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        return np.frombuffer(mmap.mmap(descriptor, size, access=access), kind)
    finally:
        os.close(descriptor)
