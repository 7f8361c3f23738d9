"""How many threads the native kernels share their work between. Their pool is kernels/native/threads.cpp's.

It is as many as PyTorch uses, unless a caller has PyTorch work alone: OpenMP's threads stay awake for milliseconds after
every operation that they shared, on the very cores that the pool needs.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _OfThread(threading.local):
    count: int | None = None  # None: as PyTorch


_of_thread = _OfThread()


def native_threads() -> int:
    """Of the calling thread's operations, itself included."""
    return _of_thread.count or torch.get_num_threads()


@contextmanager
def pytorch_alone() -> Iterator[None]:
    """Meanwhile PyTorch's own operations on this thread run on it alone; native kernels share theirs as before."""
    before, count = _of_thread.count, native_threads()
    torch_threads = torch.get_num_threads()
    _of_thread.count = count
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(torch_threads)
        _of_thread.count = before
