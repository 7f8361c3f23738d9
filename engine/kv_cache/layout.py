"""How the KV of tokens lies in a pool of bytes. Allocates nothing: the owner of the memory passes it in."""

from dataclasses import dataclass

import torch

from baton.engine.config.model_config import ModelConfig, ModelError
from baton.kernels.types import QUANTISED, KvPages

SCALE = torch.float32
KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
KV_DTYPE_ALIASES = {"fp8": "fp8_e4m3"}  # as in vLLM
PLANNED_KV_DTYPES = {"float32": torch.float32, "float16": torch.float16, **KV_DTYPES, "fp8": torch.float8_e4m3fn}
"""Of pools whose size may be asked for: models in float16 are served in another dtype."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """`[block][layer][k, v][kv_head]` of heads; a head is `[token][head_dim]` numbers, then `[token]` scales if any.

    A block is one contiguous extent of `block_bytes`, and some of its heads are a rectangular slice of it. Scales lie
    behind the numbers of their head, so that rows stay aligned as they would be without.
    """

    num_layers: int
    num_kv_heads: int
    block_tokens: int
    head_dim: int
    dtype: torch.dtype  # as stored

    @property
    def is_quantised(self) -> bool:
        return self.dtype in QUANTISED

    @property
    def token_bytes(self) -> int:
        """2 (keys, values) x layers x KV heads x (head_dim x bytes per number + bytes of a scale)."""
        row_bytes = self.head_dim * self.dtype.itemsize + (SCALE.itemsize if self.is_quantised else 0)
        return self.num_layers * 2 * self.num_kv_heads * row_bytes

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.token_bytes

    def view(self, storage: torch.Tensor, num_blocks: int) -> KvPages:
        """The first `num_blocks` blocks of `storage`, uint8 `[bytes]`, as the pool, without a copy."""
        wanted = num_blocks * self.block_bytes
        if storage.dtype != torch.uint8 or storage.dim() != 1 or storage.numel() < wanted:
            raise ValueError(
                f"{num_blocks} blocks need {wanted} uint8 in one dimension, got {storage.dtype} {storage.shape}"
            )
        heads = storage[:wanted].view(num_blocks, self.num_layers, 2, self.num_kv_heads, -1)  # each as bytes
        numbers_bytes = self.block_tokens * self.head_dim * self.dtype.itemsize
        numbers = heads[..., :numbers_bytes].view(self.dtype).unflatten(-1, (self.block_tokens, self.head_dim))
        return KvPages(numbers, heads[..., numbers_bytes:].view(SCALE) if self.is_quantised else None)

    def describe(self) -> str:
        """Stable text: two pools whose descriptions are equal hold the same bytes for the same tokens."""
        dtype = str(self.dtype).removeprefix("torch.")
        scales = " scales=float32,token,after_head" if self.is_quantised else ""
        return (
            f"order=block,layer,kv,kv_head,token,head_dim layers={self.num_layers} kv_heads={self.num_kv_heads} "
            f"block_tokens={self.block_tokens} head_dim={self.head_dim} dtype={dtype}{scales}"
        )


def kv_layout(config: ModelConfig, dtype: torch.dtype, block_tokens: int) -> KvLayout:
    """Raises: ValueError for a size of block that cannot be, ModelError for one that the dtype cannot have."""
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
    layout = KvLayout(config.num_layers, config.num_kv_heads, block_tokens, config.head_dim, dtype)
    if layout.is_quantised and block_tokens * config.head_dim % SCALE.itemsize:
        raise ModelError(
            f"scales of quantised KV need block-size x head_dim to be a multiple of {SCALE.itemsize}; "
            f"{block_tokens} x {config.head_dim} is not"
        )
    return layout
