"""Tensors that every step reads completely, in pages of 2 MiB if the system provides them.

They also form one stream of addresses. With 4 KiB pages a processor spends much of a decode step on address
translation, twice as much in a virtual machine.
"""

import mmap

import torch

HUGE_PAGE_BYTES = 2 << 20
ALIGNMENT_BYTES = 64  # cache line
STRETCH_BYTES = 64 << 20  # reserved addresses; memory is allocated page by page when written


class HugePages:
    """Allocator of copies in huge pages. Memory lives as long as any tensor in it, not as long as this object."""

    def __init__(self) -> None:
        self._stretch = torch.empty(0, dtype=torch.uint8)
        self._place = 0  # offset of the next tensor

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy after the previous one, or anywhere without huge pages."""
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
    except OSError:  # not supported by the kernel
        return None
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE_BYTES
    return memory[start : start + nbytes]
