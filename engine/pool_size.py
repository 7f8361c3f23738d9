"""How many blocks a pool has, and how long a request may be. Pure."""

from typing import NamedTuple

from engine.kv_layout import KvLayout
from engine.model_config import ModelError

LEAST_BLOCKS = 2  # one for a prompt, one to continue


class PoolSize(NamedTuple):
    blocks: int
    max_model_len: int  # tokens, prompt and answer together


def size_pool(layout: KvLayout, max_positions: int, kv_memory_bytes: int, max_model_len: int | None) -> PoolSize:
    """`max_model_len`: None: as model and memory allow. Raises: ModelError, naming the size that would fit."""
    blocks = kv_memory_bytes // layout.block_bytes
    room_tokens = blocks * layout.block_tokens
    wanted = min(max_positions, room_tokens) if max_model_len is None else max_model_len
    if wanted > max_positions:
        raise ModelError(f"max-model-len is {wanted} tokens; the model has positions for {max_positions}")
    if blocks < LEAST_BLOCKS:
        raise ModelError(
            f"kv-memory of {kv_memory_bytes} bytes holds {blocks} blocks of {layout.block_bytes} bytes; "
            f"at least {LEAST_BLOCKS} are needed"
        )
    if wanted > room_tokens:
        needed_bytes = -(-wanted // layout.block_tokens) * layout.block_bytes
        raise ModelError(
            f"max-model-len of {wanted} tokens needs {needed_bytes} bytes of kv-memory; "
            f"{kv_memory_bytes} bytes hold {room_tokens} tokens ({layout.token_bytes} bytes each)"
        )
    return PoolSize(blocks, wanted)
