"""Copies of tensors in memory pages of 2 MiB, if the system has such pages. Meant for weights, all read in every step.

With pages of 4 KiB a processor spends much of a decode step on address translation, in a virtual machine twice as much.
Copies are adjacent in memory, so that reading all of them in order is one stream of addresses.
"""

import mmap

import torch

HUGE_PAGE_BYTES = 2 << 20
ALIGNMENT_BYTES = 64  # size of a cache line
STRETCH_BYTES = 64 << 20  # bytes of address space reserved at a time; each page is allocated at its first write


class HugePages:
    """Allocator of copies in huge pages. The memory is freed with the last tensor in it, not with this object."""

    def __init__(self) -> None:
        self._stretch = torch.empty(0, dtype=torch.uint8)
        self._place = 0  # offset of the next copy in `_stretch`

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy, stored just after the previous copy; without huge pages, an ordinary copy."""
        if self._place + tensor.nbytes > len(self._stretch):
            stretch = _stretch(max(STRETCH_BYTES, tensor.nbytes))
            if stretch is None:
                return tensor.clone()
            self._stretch, self._place = stretch, 0
        own = self._stretch[self._place : self._place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._place += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return own.copy_(tensor)


def _stretch(nbytes: int) -> torch.Tensor | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    mapping = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # the kernel does not support huge pages
        return None
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE_BYTES
    return memory[start : start + nbytes]
