"""Arithmetic of pool size, concurrent requests and the memory that a step leaves."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from baton.engine.config.model_config import ModelError
from baton.engine.kv_cache.layout import KvLayout
from baton.text.block_groups import ONE_GROUP, BlockGroups

MIN_COLUMNS = 2  # minimum columns of a block table: one for a prompt, one for its answer


class PoolSize(NamedTuple):
    blocks: int
    max_model_len: int  # prompt and answer together


def size_pool(layout: KvLayout, max_positions: int, kv_memory_bytes: int, max_model_len: int | None) -> PoolSize:
    """Return the number of blocks and the context length.

    `max_model_len`: by default, what model and memory allow. Raises: ModelError, naming the size that would fit.
    """
    blocks, least_blocks = kv_memory_bytes // layout.block_bytes, layout.groups.blocks(MIN_COLUMNS)
    room_tokens = layout.groups.most_columns(blocks) * layout.block_tokens
    wanted = min(max_positions, room_tokens) if max_model_len is None else max_model_len
    if wanted > max_positions:
        raise ModelError(
            f"max-model-len: {wanted} tokens exceed the model's {max_positions} positions; give {max_positions} at most"
        )
    if blocks < least_blocks:
        raise ModelError(
            f"kv-memory: {kv_memory_bytes} bytes are {blocks} blocks of {layout.block_bytes} bytes; at least "
            f"{least_blocks} are needed: give {least_blocks * layout.block_bytes} bytes"
        )
    if wanted > room_tokens:
        needed_bytes = layout.groups.most_blocks(-(-wanted // layout.block_tokens)) * layout.block_bytes
        raise ModelError(
            f"max-model-len: {wanted} tokens need {needed_bytes} bytes of kv-memory; {kv_memory_bytes} bytes "
            f"store {room_tokens} tokens ({layout.token_bytes} bytes each): raise kv-memory or lower "
            "max-model-len"
        )
    return PoolSize(blocks, wanted)


@dataclass(frozen=True, slots=True)
class KvSizing:
    """Pool size, and the maximum length of a request, prompt and answer together."""

    token_bytes: int
    block_tokens: int
    kv_memory_bytes: int
    max_model_len: int
    state_bytes: int = 0  # bytes of a recurrent state, in each block in addition to its tokens
    groups: BlockGroups = ONE_GROUP

    @classmethod
    def of(cls, layout: KvLayout, kv_memory_bytes: int, max_model_len: int) -> "KvSizing":
        own = (layout.token_bytes, layout.block_tokens, kv_memory_bytes, max_model_len)
        return cls(*own, layout.state_bytes, layout.groups)

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.token_bytes // self.groups.count + self.state_bytes

    @property
    def blocks(self) -> int:
        return self.kv_memory_bytes // self.block_bytes

    @property
    def tokens(self) -> int:
        """Number of tokens whose KV fits, if windows have not released any."""
        return self.blocks // self.groups.count * self.block_tokens

    @property
    def request_blocks(self) -> int:
        """Number of blocks of a request of maximum length while its prompt is computed."""
        return self.groups.most_blocks(-(-self.max_model_len // self.block_tokens))

    @property
    def answer_blocks(self) -> int:
        """Number of blocks of a request of maximum length after its windows have released what they can."""
        columns = -(-self.max_model_len // self.block_tokens)
        return self.groups.blocks(columns, self.groups.first_live(self.max_model_len))

    @property
    def concurrency(self) -> float:
        """Number of concurrent requests of maximum length, if at most one of them is still computing its prompt."""
        if self.blocks < self.request_blocks:
            return self.blocks / self.request_blocks
        return 1 + (self.blocks - self.request_blocks) / self.answer_blocks

    def bytes_for(self, requests: int) -> int:
        """Return the pool bytes for `requests` concurrent requests of maximum length."""
        return (self.request_blocks + (requests - 1) * self.answer_blocks) * self.block_bytes

    @property
    def concurrency_text(self) -> str:
        return f"Maximum concurrency for {self.max_model_len:,} tokens per request: {self.concurrency:.2f}x"


def host_pieces(slots: int, block_bytes: int) -> Iterator[int]:
    """Divide the slots into allocations of host memory, and yield the number of slots of each.

    PyTorch rounds pinned memory up to a power of two, so allocations just below a power of two waste little.
    """
    while slots:
        whole = _rounded(slots * block_bytes)
        piece = slots if whole // block_bytes == slots else max(1, whole // 2 // block_bytes)
        yield piece
        slots -= piece


def most_host_slots(host_bytes: int, block_bytes: int) -> int:
    """Return the maximum number of slots whose allocations fit in `host_bytes`."""
    slots = host_bytes // block_bytes
    while sum(_rounded(piece * block_bytes) for piece in host_pieces(slots, block_bytes)) > host_bytes:
        slots -= 1
    return slots


def _rounded(size_bytes: int) -> int:
    return 1 << (size_bytes - 1).bit_length()


GPU_RESERVE_BYTES = 1 << 30  # memory that PyTorch does not count: context, kernels, CUDA graphs, fragmentation


MAX_RECORDED_ROWS = 256  # maximum number of sequences of a recorded decode step


def recorded_logits_bytes(rows: int, vocab_size: int, itemsize: int) -> int:
    """Return the bytes of logits that recorded decode steps keep: in the model's dtype, and in float32."""
    return min(rows, MAX_RECORDED_ROWS) * vocab_size * (4 + itemsize)


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Memory of one GPU, in bytes, measured after the largest step over a pool of few blocks."""

    total: int
    free: int  # unused by any process
    allocated: int  # used by this process between steps: weights and the small pool
    peak: int  # most that this process used during the step
    pool: int  # size of the small pool, part of `allocated` and `peak`


def spare_kv_bytes(memory: StepMemory, utilization: float, set_aside: int = 0) -> int:
    """Return the bytes left for KV, limited by `utilization` and by free memory; zero or negative if none are left.

    `utilization`: this process's share of the GPU's memory. Other processes' memory counts only if it leaves less.
    `set_aside`: bytes for what is loaded later, such as adapters.
    """
    needed = memory.peak - memory.pool + set_aside + GPU_RESERVE_BYTES
    of_share = int(memory.total * utilization) - needed
    working = memory.peak - memory.allocated
    of_free = memory.free + memory.pool - working - set_aside - GPU_RESERVE_BYTES // 2
    return min(of_share, of_free)
