"""Host memory between the pool and the files of a worker, or in their place."""

import errno
import hashlib
import threading
from pathlib import Path

import pytest

from baton.engine.config.model_config import ModelError
from baton.process.config import ByteSize
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.session_client import eventually
from tests.fixtures.tier_stack import TierStack, tier_stack
from tests.worker.test_role_change import answer, elastic

HASHES = [hashlib.sha256(bytes([index])).digest() for index in range(5)]
TOKENS = 22  # five complete blocks of four, and two tokens
MEMORY_BLOCKS = 200


async def in_memory(stack: TierStack, blocks: int) -> None:
    await eventually(lambda: stack.tier.state.memory_blocks >= blocks)


async def test_memory_blocks_are_restored_without_reading_files(tmp_path: Path) -> None:
    async with tier_stack(tmp_path, memory_blocks=MEMORY_BLOCKS) as stack:
        published = await stack.publish(HASHES)
        before = [stack.block_bytes(block) for block in published]
        await in_memory(stack, 5)
        await stack.forget()
        stack.faults.failing["read"] = errno.EIO
        timings = await stack.ask(1, HASHES, TOKENS)
        assert (timings.restored_tokens, timings.cached_tokens) == (20, 20)
        own = await stack.worker.on_engine(lambda: stack.worker.pool.touch(HASHES))
        assert [stack.block_bytes(block) for block in own] == before
        assert stack.tier.state.reads


async def test_files_keep_blocks_over_a_restart_and_memory_has_them_after_a_load(tmp_path: Path) -> None:
    async with tier_stack(tmp_path, memory_blocks=MEMORY_BLOCKS) as stack:
        await stack.publish(HASHES)
    async with tier_stack(tmp_path, memory_blocks=MEMORY_BLOCKS) as stack:
        assert (stack.tier.state.blocks, stack.tier.state.memory_blocks) == (5, 0)
        assert (await stack.ask(1, HASHES, TOKENS)).restored_tokens == 20
        await in_memory(stack, 5)


async def test_memory_is_filled_while_the_disk_is_full(tmp_path: Path) -> None:
    async with tier_stack(tmp_path, memory_blocks=MEMORY_BLOCKS) as stack:
        stack.faults.failing["write"] = errno.ENOSPC
        await stack.worker.cache(HASHES)
        await in_memory(stack, 5)
        await eventually(lambda: not stack.tier.state.writes)
        await stack.forget()
        assert (await stack.ask(1, HASHES, TOKENS)).restored_tokens == 20


async def test_memory_alone_keeps_evicted_pool_blocks() -> None:
    async with tier_stack(None, evicted=HASHES) as stack:
        assert (await stack.ask(1, HASHES, TOKENS)).restored_tokens == 20


async def test_memory_is_empty_in_the_next_process(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny", "llama", seed=4)
    for _ in range(2):
        async with elastic(checkpoint, "decode", kv_tier_memory=ByteSize(4 << 20)) as (worker, endpoint):
            tier = worker.host.tier
            assert tier is not None and tier.state.memory_blocks == 0
            assert (await answer(endpoint, 1, epoch=1))[1] == 0
            await eventually(lambda tier=tier: tier.state.memory_blocks >= 10)
            assert tier.state.size_bytes == 0 < tier.state.memory_bytes


async def test_memory_bound_below_any_model_is_rejected_with_the_smallest_valid_one(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny", "llama", seed=4)
    with pytest.raises(ModelError, match="kv-tier-memory: 1000 bytes are too few"):
        async with elastic(checkpoint, "prefill", kv_tier_memory=ByteSize(1000)):
            pass
    await eventually(lambda: "kv-accept" not in {thread.name for thread in threading.enumerate()})
