"""Copies whole blocks inside the pool: what copy on write does before a step."""

import torch

from kernels import reference
from kernels.check import check_index
from kernels.kv_pages import KvPages
from kernels.on_triton import triton_kernels


def copy_blocks(kv: KvPages, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """Copies block `sources[i]` to block `destinations[i]` over all layers, scales and all, in place.

    kv: the pool; sources, destinations: int64 `[copies]`. Destinations are distinct and no block is both source and
    destination, so the order of the copies does not matter.
    """
    check_index("sources", sources)
    check_index("destinations", destinations, sources.shape[0])
    kernels = triton_kernels(kv.data)
    (reference if kernels is None else kernels).copy_blocks(kv, sources, destinations)
