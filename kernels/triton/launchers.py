"""All operations that have a Triton kernel, under their names in kernels/*.py, where their contracts and checks are."""

from baton.kernels.triton.delta import causal_convolution, gated_delta_rule
from baton.kernels.triton.few_rows import fused_linear, most_fused_rows
from baton.kernels.triton.linear import dequantise_weight, expert_linear, quantised_linear
from baton.kernels.triton.norms import add_rms_norm, gate_mul, rms_norm
from baton.kernels.triton.paged_decode import paged_decode, rotated_decode
from baton.kernels.triton.paged_prefill import paged_prefill, paged_prefills
from baton.kernels.triton.pages import (
    compile_copies,
    copy_blocks,
    gather_blocks,
    rotate_and_store,
    scatter_blocks,
    store_kv,
)
from baton.kernels.triton.sample import sample_tokens

__all__ = [
    "add_rms_norm",
    "causal_convolution",
    "compile_copies",
    "copy_blocks",
    "dequantise_weight",
    "expert_linear",
    "fused_linear",
    "gate_mul",
    "gated_delta_rule",
    "gather_blocks",
    "most_fused_rows",
    "paged_decode",
    "paged_prefill",
    "paged_prefills",
    "quantised_linear",
    "rms_norm",
    "rotate_and_store",
    "rotated_decode",
    "sample_tokens",
    "scatter_blocks",
    "store_kv",
]
