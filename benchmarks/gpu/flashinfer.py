"""Our attention against FlashInfer's, on the same numbers. Its wheel compiles its kernels with nvcc at first."""

import importlib
from typing import Any

import torch

from baton.benchmarks.gpu.attention import (
    BLOCK_TOKENS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    SCORING,
    Contexts,
    contexts,
)
from baton.benchmarks.gpu.row import AbsentError, Figure, Row, Setting, at_least
from baton.benchmarks.gpu.timing import seconds
from baton.kernels.attention import paged_prefill

WORKSPACE_BYTES = 256 << 20
LAYOUT = "HND"  # [block][kv][head][token][dim], as ours


def library() -> Any:
    try:
        return importlib.import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as error:
        raise AbsentError(f"flashinfer: {error}") from error


def workspace(setting: Setting) -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=setting.device)


def decode_ratio(flashinfer: Any, asked: Contexts, setting: Setting) -> float:
    """Their time over ours, in turns."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(setting), LAYOUT, use_tensor_cores=True)
    indptr, ids = asked.block_starts.int(), asked.block_ids.int()
    last = torch.full_like(asked.context_tokens, BLOCK_TOKENS, dtype=torch.int32)
    wrapper.plan(indptr, ids, last, HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS, q_data_type=torch.bfloat16)
    data = asked.kv.layer(0).data.contiguous()
    torch.testing.assert_close(asked.decode(0), wrapper.run(asked.query, data), atol=2e-2, rtol=2e-2)
    return seconds(lambda: wrapper.run(asked.query, data), setting) / seconds(lambda: asked.decode(0), setting)


def prefill_ratio(flashinfer: Any, asked: Contexts, setting: Setting) -> float:
    kv, ids, tokens = asked.kv.layer(0), asked.block_ids, int(asked.context_tokens[0])
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(setting), LAYOUT)
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=setting.device)
    last = torch.tensor([BLOCK_TOKENS], dtype=torch.int32, device=setting.device)
    wrapper.plan(
        starts, asked.block_starts.int(), ids.int(), last, HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS,
        causal=True, q_data_type=torch.bfloat16,
    )  # fmt: skip
    query = torch.randn(tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=setting.device)
    data = kv.data.contiguous()
    ours = paged_prefill(query, kv, ids, 0, SCORING)
    torch.testing.assert_close(ours, wrapper.run(query, data), atol=2e-2, rtol=2e-2)
    theirs_s = seconds(lambda: wrapper.run(query, data), setting)
    return theirs_s / seconds(lambda: paged_prefill(query, kv, ids, 0, SCORING), setting)


def against_flashinfer(setting: Setting) -> list[Figure]:
    flashinfer = library()
    decode = decode_ratio(flashinfer, contexts(32, 4096, 1, setting), setting)
    prefill = prefill_ratio(flashinfer, contexts(1, 8192, 1, setting), setting)
    version = f"FlashInfer {flashinfer.__version__}"
    return [
        Figure("decode, 32 x 4096", decode, "of its speed", at_least(0.97), version),
        Figure("prefill, 8192", prefill, "of its speed", at_least(0.65), version),
    ]


ROWS = (Row("flashinfer", against_flashinfer),)
