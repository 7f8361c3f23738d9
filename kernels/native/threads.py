"""How many threads the native kernels share their work between. Their pool is kernels/native/threads.cpp's.

It is as many as PyTorch uses, unless a caller has PyTorch work alone: OpenMP's threads stay awake for milliseconds
after every operation that they shared, on the very cores that the pool needs. Cores that are borrowed come on top.
"""

import ctypes
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch


class _OfThread(threading.local):
    count: int | None = None  # None: as PyTorch
    borrowed: int = 0


_of_thread = _OfThread()


def native_threads() -> int:
    """Of the calling thread's operations, itself included."""
    return (_of_thread.count or torch.get_num_threads()) + _of_thread.borrowed


@contextmanager
def pytorch_alone() -> Iterator[None]:
    """Meanwhile PyTorch's own operations on this thread run on it alone; native kernels share theirs as before."""
    before, threads = _of_thread.count, torch.get_num_threads()
    _of_thread.count = before or threads
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _of_thread.count = before


class NativeThreads:
    """The pool of one shared library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._borrow = library.baton_borrow
        self._borrow.argtypes = (ctypes.c_void_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_int32), ctypes.c_int32)
        self._borrow.restype = None
        self._in_use: npt.NDArray[np.uint8] | None = None

    def borrow(self, cores: Collection[int], in_use: npt.NDArray[np.uint8]) -> None:
        """From now on operations of the calling thread use one thread more on each of `cores`, behind whatever else
        runs there, while `in_use` is 0: one byte in memory that the owner of the cores writes. It is only read, and
        kept alive.

        To be called before operations were shared between more threads than PyTorch uses now, and once in a process.
        """
        self._in_use = in_use
        numbers = (ctypes.c_int32 * len(cores))(*cores)
        self._borrow(in_use.ctypes.data, torch.get_num_threads(), numbers, len(cores))
        _of_thread.borrowed = len(cores)
