"""Attention of prompt chunks by FlashInfer (https://docs.flashinfer.ai), an optional library that reads paged KV.

A layer of the pool is in FlashInfer's layout HND with a stride between blocks; block ids are int32. FlashInfer plans
the work of a step once for all layers. This code has never run on a GPU.
"""

import importlib
import importlib.util
from dataclasses import replace
from typing import Any

import torch

from baton.kernels.types import KvLayer, PrefillChunks, Scoring

WORKSPACE_BYTES = 128 << 20  # size of the workspace that FlashInfer's documentation recommends
LAYOUT = "HND"


def is_installed() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def is_compiled() -> bool:
    """Return whether FlashInfer's kernels are precompiled. Compiling them takes minutes and needs CUDA's compiler."""
    return is_installed() and importlib.util.find_spec("flashinfer_jit_cache") is not None


class FlashInferPrefill:
    """FlashInfer for one model on one device. Plans one step at a time, for the current CUDA stream."""

    def __init__(self, heads: int, kv: KvLayer) -> None:
        """Load FlashInfer. `kv`: any layer of the pool, unquantised 16-bit floats.

        Raises: ImportError, OSError, RuntimeError if FlashInfer is not installed or cannot be loaded.
        """
        library: Any = importlib.import_module("flashinfer")
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=kv.data.device)
        self._wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, LAYOUT)
        self._sizes = (heads, kv.kv_heads, kv.head_dim, kv.block_tokens)
        self._dtype, self._block_tokens = kv.data.dtype, kv.block_tokens
        self._planned = torch.cuda.Event() if kv.data.is_cuda else None

    def plan(self, prefills: PrefillChunks) -> PrefillChunks:
        """Return a copy of `prefills` whose `planned` function computes its last chunks. Invalidates earlier plans."""
        if not prefills.by_library:
            return prefills
        chunks = prefills.chunks[-prefills.by_library :]
        row_starts, block_starts, last = [0], [0], []
        for each in chunks:
            tokens = each.rows.stop - each.rows.start
            row_starts.append(row_starts[-1] + tokens)
            block_starts.append(block_starts[-1] + len(each.block_ids))
            last.append((each.start + tokens - 1) % self._block_tokens + 1)
        block_ids = torch.cat([each.block_ids for each in chunks]).int()
        if self._planned is not None:
            self._planned.synchronize()  # the previous plan may still be copied from the same pinned memory
        rows, blocks, ends = (self._on_host(numbers) for numbers in (row_starts, block_starts, last))
        self._wrapper.plan(
            rows, blocks, block_ids, ends, *self._sizes, causal=True, sm_scale=1.0, q_data_type=self._dtype
        )
        if self._planned is not None:
            self._planned.record()
        return replace(prefills, planned=self._attend)

    def _attend(self, query: torch.Tensor, kv: KvLayer, scoring: Scoring, out: torch.Tensor) -> None:
        self._wrapper.run(query, kv.data, q_scale=scoring.scale, out=out)  # the plan was made with scale 1

    def _on_host(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, pin_memory=self._planned is not None)
