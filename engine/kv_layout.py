"""How the KV of tokens lies in a pool of bytes. Allocates nothing: whoever owns the memory hands it in."""

from dataclasses import dataclass

import torch

from engine.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class KvLayout:
    """`[block][layer][k, v][kv_head][token][head_dim]`: a block is one contiguous extent of `block_bytes`."""

    num_layers: int
    num_kv_heads: int
    block_tokens: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.token_bytes

    def view(self, storage: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """The first `num_blocks` blocks of `storage`, uint8 `[bytes]`, as the six-dimensional pool, without a copy."""
        wanted = num_blocks * self.block_bytes
        if storage.dtype != torch.uint8 or storage.dim() != 1 or storage.numel() < wanted:
            raise ValueError(
                f"{num_blocks} blocks need {wanted} uint8 in one dimension, got {storage.dtype} {storage.shape}"
            )
        shape = (num_blocks, self.num_layers, 2, self.num_kv_heads, self.block_tokens, self.head_dim)
        return storage[:wanted].view(self.dtype).view(shape)

    def describe(self) -> str:
        """Stable text: two pools whose descriptions are equal hold the same bytes for the same tokens."""
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"order=block,layer,kv,kv_head,token,head_dim layers={self.num_layers} kv_heads={self.num_kv_heads} "
            f"block_tokens={self.block_tokens} head_dim={self.head_dim} dtype={dtype}"
        )


def kv_layout(config: ModelConfig, dtype: torch.dtype, block_tokens: int) -> KvLayout:
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
    return KvLayout(config.num_layers, config.num_kv_heads, block_tokens, config.head_dim, dtype)
