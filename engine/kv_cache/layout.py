"""Byte layout of KV in a pool. Allocates nothing: the owner of the memory passes it in."""

import math
from dataclasses import dataclass, replace

import torch

from baton.engine.config.model_config import DecoderConfig, ModelConfig, ModelError
from baton.engine.kv_cache.groups import layer_groups
from baton.kernels.types import QUANTISED, KvPages
from baton.text.block_groups import ONE_GROUP, BlockGroups

SCALE = torch.float32
BLOCK_TOKENS = 32  # default tokens per block
STATE = torch.float32
STATE_SHARE = 0.5
STATE_ALIGNED_BYTES = 16
STATE_ROOM_BYTES = 128  # bytes after a state's numbers, for its token count; divided among ranks
KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
KV_DTYPE_ALIASES = {"fp8": "fp8_e4m3"}  # as in vLLM


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Layout `[block][layer][k, v][kv_head]`; a head is `[token][head_dim]` numbers, then `[token]` scales if any.

    If values are prefixes of keys, only keys are stored: `[block][layer][k][kv_head]`.

    For models with a recurrent state, the state after a block's last computed token is stored at the block's end:
    `state_numbers` in float32, then its token count in int32. So copying, swapping, sending and naming blocks covers
    states too. With several ranks, each rank stores its part of the numbers, and the token count.

    A block is one contiguous extent of `block_bytes`; a range of its heads is a rectangular slice. Scales follow the
    numbers of their head, so that rows stay aligned. A block has the layers of one of `groups`; a column has one block
    per group.
    """

    num_layers: int  # layers per block; a layer with larger keys than the others counts as several
    num_kv_heads: int
    block_tokens: int
    head_dim: int
    dtype: torch.dtype  # stored dtype
    value_prefix: int | None = None  # leading numbers of a key that are its value; None: values are stored separately
    state_numbers: int = 0  # float32 numbers of a recurrent state; 0 without one
    state_ranks: int = 1  # ranks among which the state is divided
    groups: BlockGroups = ONE_GROUP

    @property
    def kinds(self) -> int:
        """Number of stored kinds per head: 2 (keys and values), or 1 if values are prefixes of keys."""
        return 1 if self.value_prefix is not None else 2

    @property
    def is_quantised(self) -> bool:
        return self.dtype in QUANTISED

    @property
    def dtype_name(self) -> str:
        """Stored dtype, as a key of KV_DTYPES."""
        return next(name for name, dtype in KV_DTYPES.items() if dtype == self.dtype)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token: kinds × layers × KV heads × (head_dim × bytes per number + bytes of a scale)."""
        row_bytes = self.head_dim * self.dtype.itemsize + (SCALE.itemsize if self.is_quantised else 0)
        return self.groups.count * self.num_layers * self.kinds * self.num_kv_heads * row_bytes

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.token_bytes // self.groups.count + self.state_bytes

    @property
    def column_bytes(self) -> int:
        return self.block_bytes * self.groups.count

    @property
    def state_bytes(self) -> int:
        """Bytes of a state and its token count on all ranks, rounded up to STATE_ALIGNED_BYTES."""
        if not self.state_numbers:
            return 0
        wanted = self.state_numbers * STATE.itemsize + STATE_ROOM_BYTES // self.state_ranks
        return wanted + -wanted % STATE_ALIGNED_BYTES

    @property
    def rows(self) -> int:
        """Number of rows of heads in a block; 1 with a recurrent state, which is not divided by heads."""
        return 1 if self.state_numbers else self.kinds * self.num_layers

    def view(self, storage: torch.Tensor, num_blocks: int) -> KvPages:
        """Return a pool over the first `num_blocks` blocks of `storage` (uint8 `[bytes]`), without a copy."""
        wanted = num_blocks * self.block_bytes
        if storage.dtype != torch.uint8 or storage.dim() != 1 or storage.numel() < wanted:
            raise ValueError(
                f"storage: {num_blocks} blocks need {wanted} bytes of one-dimensional uint8, got {storage.dtype} "
                f"{storage.shape}"
            )
        blocks = storage[:wanted].view(num_blocks, self.block_bytes)
        kv, states = blocks.split((self.block_bytes - self.state_bytes, self.state_bytes), dim=1)
        heads = kv.unflatten(1, (self.num_layers, self.kinds, self.num_kv_heads, -1))  # [..., bytes of a head]
        numbers_bytes = self.block_tokens * self.head_dim * self.dtype.itemsize
        numbers = heads[..., :numbers_bytes].view(self.dtype).unflatten(-1, (self.block_tokens, self.head_dim))
        scales = heads[..., numbers_bytes:].view(SCALE) if self.is_quantised else None
        return KvPages(numbers, scales, self.value_prefix, states.view(STATE) if self.state_numbers else None)

    def describe(self) -> str:
        """Return stable text that is equal for two pools iff they store the same bytes for the same tokens."""
        dtype = str(self.dtype).removeprefix("torch.")
        scales = " scales=float32,token,after_head" if self.is_quantised else ""
        values = "" if self.value_prefix is None else f" values=first_{self.value_prefix}_of_key"
        state = f" state={self.state_numbers}:float32,room_{STATE_ROOM_BYTES},after_block" if self.state_numbers else ""
        windows = f"{self.groups.windowed}:last_{self.groups.window_tokens}"
        groups = f" groups={self.groups.whole}:all,{windows}" if self.groups.windowed else ""
        return (
            f"order=block,layer,kv,kv_head,token,head_dim layers={self.num_layers} kv_heads={self.num_kv_heads} "
            f"block_tokens={self.block_tokens} head_dim={self.head_dim} dtype={dtype}{scales}{values}{state}{groups}"
        )


def kv_layout(config: ModelConfig, dtype: torch.dtype, block_tokens: int | None) -> KvLayout:
    """Return the KV layout of a model.

    `block_tokens`: by default the least multiple of BLOCK_TOKENS at which a state is at most STATE_SHARE of a block.
    Raises: ValueError for an invalid block size, ModelError for one that the dtype does not allow.
    """
    if block_tokens is not None and block_tokens < 1:
        raise ValueError(f"block_tokens: must be at least 1, got {block_tokens}")
    dealt = layer_groups(config, block_tokens or BLOCK_TOKENS)
    sizes = (dealt.layers, config.num_kv_heads, block_tokens or BLOCK_TOKENS, config.head_dim)
    layout = KvLayout(*sizes, dtype, config.value_prefix, config.state_numbers, config.state_ranks, dealt.groups)
    if block_tokens is None and layout.state_numbers:
        least_bytes = layout.state_bytes * (1 - STATE_SHARE) / STATE_SHARE
        blocks = math.ceil(least_bytes / (layout.token_bytes * BLOCK_TOKENS))
        block_tokens = max(1, blocks) * BLOCK_TOKENS
        layout = replace(layout, block_tokens=block_tokens)
    block_tokens = layout.block_tokens
    if layout.is_quantised and len(set(config.kv_units)) > 1:
        raise ModelError(
            f"kv-cache-dtype {layout.dtype_name}: layers of {config.family} differ in the size of their keys, which "
            "is supported in float32 and bfloat16 only; use auto"
        )
    chunk = config.attention_chunk if isinstance(config, DecoderConfig) else None
    if chunk is not None and chunk % block_tokens:
        raise ModelError(f"block-size {block_tokens} does not divide attention_chunk_size {chunk} of {config.family}")
    if layout.is_quantised and block_tokens * config.head_dim % SCALE.itemsize:
        raise ModelError(
            f"scales of quantised KV need block-size x head_dim to be a multiple of {SCALE.itemsize}; "
            f"{block_tokens} x {config.head_dim} is not"
        )
    return layout
