"""All operations that have a Triton kernel, under the names of kernels/*.py: there are the contracts and checks."""

from kernels.triton.copy_rows import copy_blocks, gather_blocks, scatter_blocks
from kernels.triton.expert_linear import expert_linear
from kernels.triton.paged_decode import paged_decode
from kernels.triton.paged_prefill import paged_prefill
from kernels.triton.quantised_linear import dequantise_weight, quantised_linear
from kernels.triton.rms_norm import add_rms_norm, rms_norm
from kernels.triton.rotate_and_store import rotate_and_store
from kernels.triton.sample import sample_tokens
from kernels.triton.silu_mul import silu_mul
from kernels.triton.store_kv import store_kv

__all__ = [
    "add_rms_norm",
    "copy_blocks",
    "dequantise_weight",
    "expert_linear",
    "gather_blocks",
    "paged_decode",
    "paged_prefill",
    "quantised_linear",
    "rms_norm",
    "rotate_and_store",
    "sample_tokens",
    "scatter_blocks",
    "silu_mul",
    "store_kv",
]
