"""Numbers that every step reads from end to end, moved into pages of 2 MiB where the system gives them.

One after the other they also make one stream of addresses. With pages of 4 KiB a processor spends a good part of a
decode step on looking up where the next page is, twice over in a virtual machine.
"""

import mmap
from collections.abc import Sequence

import torch

HUGE_PAGE_BYTES = 2 << 20
ALIGNMENT_BYTES = 64  # of a cache line


def move_to_huge_pages(tensors: Sequence[torch.Tensor]) -> None:
    """Each tensor, contiguous and of a CPU, keeps its numbers and has them elsewhere; views of it do not follow.

    Does nothing where the system has no such pages, or there is less than one page of numbers.
    """
    nbytes = sum(_aligned(tensor.nbytes) for tensor in tensors)
    if nbytes < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    mapping = mmap.mmap(-1, nbytes + 2 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them
        return
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    place = -memory.data_ptr() % HUGE_PAGE_BYTES
    for tensor in tensors:
        own = memory[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        own.copy_(tensor)
        tensor.set_(own.untyped_storage(), own.storage_offset(), own.shape, own.stride())
        place += _aligned(tensor.nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
