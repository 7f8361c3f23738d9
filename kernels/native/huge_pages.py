"""Numbers that every step reads from end to end, in pages of 2 MiB where the system gives them.

One after the other they also make one stream of addresses. With pages of 4 KiB a processor spends a good part of a
decode step on looking up where the next page is, twice over in a virtual machine.
"""

import mmap

import torch

HUGE_PAGE_BYTES = 2 << 20
ALIGNMENT_BYTES = 64  # of a cache line
STRETCH_BYTES = 64 << 20  # addresses taken at once; memory is taken page by page, as it is filled


class HugePages:
    """Takes tensors in one by one. Memory lives as long as any tensor in it, not as long as this."""

    def __init__(self) -> None:
        self._stretch = torch.empty(0, dtype=torch.uint8)
        self._place = 0  # of the next tensor in the stretch

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers, contiguous, behind those of the tensor before; anywhere if the system has no such pages."""
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
    except OSError:  # a kernel without them
        return None
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE_BYTES
    return memory[start : start + nbytes]
