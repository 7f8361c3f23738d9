"""Has the kernel put memory behind a pool before it is used. The first write to a memory page takes microseconds, and
the next token of an answer writes to hundreds of such pages: otherwise a decode step would pay for that.
"""

import ctypes
import logging
import mmap
import os

import numpy as np
import numpy.typing as npt
import torch

MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23  # linux/mman.h, kernel 5.14; Python has no names for them

logger = logging.getLogger(__name__)


def back(storage: torch.Tensor) -> None:
    """`storage`: uint8, one dimension, on the CPU; its contents stay. Takes up to a second per GiB, without the GIL.

    Before anything is served: meanwhile threads that map or unmap memory wait. Where the kernel refuses, pages come as
    they are used.
    """
    _populate(storage.data_ptr(), storage.numel(), MADV_POPULATE_WRITE)


def map_in(memory: npt.NDArray[np.uint8]) -> None:
    """Enters this process's mapping of memory that another process has backed, before it is read. 0.1 s per GiB."""
    _populate(memory.ctypes.data, memory.size, MADV_POPULATE_READ)


def _populate(address: int, nbytes: int, advice: int) -> None:
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if length > 0 and madvise(first, length, advice) != 0:
        logger.info(
            "the pool could not be allocated in advance, but is on first use: madvise: %s",
            os.strerror(ctypes.get_errno()),
        )
