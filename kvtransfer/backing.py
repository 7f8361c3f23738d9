"""Has the kernel put memory behind a pool before it is used. The first write to a page takes microseconds, and the next
token of an answer writes to hundreds of pages: without this they would be paid for in the middle of a step.
"""

import ctypes
import logging
import mmap
import os

import torch

MADV_POPULATE_WRITE = 23  # linux/mman.h, kernel 5.14; Python has no name for it

logger = logging.getLogger(__name__)


def back(storage: torch.Tensor) -> None:
    """`storage`: uint8, one dimension, on the CPU; its contents stay. Takes up to a second per GiB, without the GIL.

    Before anything is served: meanwhile whoever maps or unmaps memory waits. Where the kernel refuses, pages come as
    they are used.
    """
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (storage.data_ptr() + storage.numel() - first) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if length > 0 and madvise(first, length, MADV_POPULATE_WRITE) != 0:
        logger.info("memory of the pool comes as it is used: madvise: %s", os.strerror(ctypes.get_errno()))
