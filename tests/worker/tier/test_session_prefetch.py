"""Sessions that are expected soon: their blocks come from files before their next turn does."""

import asyncio
import errno
import hashlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from baton.engine.kv_cache.eviction import SessionCounts
from baton.engine.kv_cache.sessions import SessionTurn
from baton.kvtransfer.slices import PoolShape
from baton.kvtransfer.tier.memory import MemoryDisk
from baton.kvtransfer.tier.staging import BlockCopier
from baton.kvtransfer.tier.store import TierStore
from baton.worker.tier import prefetch
from baton.worker.tier.prefetch import LEAD_S, Prefetcher
from baton.worker.tier.restorer import RestoreOptions
from baton.worker.tier.tier import KvTier
from tests.fixtures.session_client import eventually
from tests.fixtures.tier_stack import FORMAT, TierStack, tier_stack
from tests.fixtures.worker_stack import BLOCK_BYTES, BLOCK_TOKENS, BLOCKS, prompt_command

HASHES = [hashlib.sha256(bytes([index])).digest() for index in range(5)]
TOKENS = 22  # five complete blocks of four, and two tokens


@asynccontextmanager
async def prefetching(stack: TierStack, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(prefetch, "PERIOD_S", 0.01)
    task = asyncio.create_task(Prefetcher(stack.worker.loop, stack.tier.restorer).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def turn_has_ended(stack: TierStack, pause_s: float, names: Sequence[bytes] = HASHES) -> None:
    """Of a session whose next one is expected after so long."""

    def end() -> None:
        sessions = stack.worker.pool.order.sessions
        sessions.file_price = 0.1
        asked = SessionTurn(b"agent", b"ann", time.monotonic(), keep_for_s=600.0)
        session = sessions.begin(asked)
        session.pauses, session.usual_pause_s = 2, pause_s
        sessions.end(session, asked, len(names), names)

    await stack.worker.on_engine(end)


async def counts(stack: TierStack) -> SessionCounts:
    return await stack.worker.on_engine(lambda: stack.worker.pool.order.counts)


async def test_evicted_blocks_are_loaded_before_the_turn_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tier_stack(tmp_path) as stack:
        published = await stack.publish(HASHES)
        before = [stack.block_bytes(block) for block in published]
        await stack.forget()
        async with prefetching(stack, monkeypatch):
            await turn_has_ended(stack, pause_s=1.0)
            await eventually(lambda: stack.worker.service.cache.sum.blocks == 5)
        made = await counts(stack)
        assert (made.prefetched_blocks, made.prefetched_used_blocks, made.protected_blocks) == (5, 0, 5)
        own = await stack.worker.on_engine(lambda: stack.worker.pool.touch(HASHES))
        assert [stack.block_bytes(block) for block in own] == before
        timings = await stack.ask(1, HASHES, TOKENS)
        assert (timings.restored_tokens, timings.cached_tokens) == (0, 20)
        assert (await counts(stack)).prefetched_used_blocks == 5


async def test_distant_turn_loads_nothing_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with tier_stack(tmp_path, evicted=HASHES) as stack:
        async with prefetching(stack, monkeypatch):
            await turn_has_ended(stack, pause_s=LEAD_S + 60.0)
            await turns_of_the_prefetcher(stack)
        assert (await counts(stack)).prefetched_blocks == 0


async def test_no_block_of_another_session_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with tier_stack(tmp_path, evicted=HASHES) as stack:
        pool = stack.worker.pool
        held = await stack.worker.on_engine(lambda: pool.allocate(BLOCKS - len(HASHES) + 1))
        async with prefetching(stack, monkeypatch):
            await turn_has_ended(stack, pause_s=1.0)
            await turns_of_the_prefetcher(stack)
        await stack.worker.on_engine(lambda: [pool.release(block) for block in held])
        assert (await counts(stack)).prefetched_blocks == 0


async def test_blocks_missing_in_files_are_not_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [hashlib.sha256(b"other" + each).digest() for each in HASHES]
    async with tier_stack(tmp_path, evicted=HASHES) as stack:
        async with prefetching(stack, monkeypatch):
            await turn_has_ended(stack, pause_s=1.0, names=others)
            await turns_of_the_prefetcher(stack)
        assert (await counts(stack)).prefetched_blocks == 0


async def test_queued_prompt_has_the_room_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with tier_stack(tmp_path, evicted=HASHES) as stack:
        pool = stack.worker.pool
        held = await stack.worker.on_engine(lambda: pool.allocate(pool.available - 6))
        await stack.router.send(prefill=prompt_command(1, b"s" * 16, tokens=30, block_hashes=[]))  # eight blocks
        await eventually(lambda: stack.worker.loop.load.waiting_sequences == 1)
        async with prefetching(stack, monkeypatch):
            await turn_has_ended(stack, pause_s=1.0)
            await turns_of_the_prefetcher(stack)
        assert (await counts(stack)).prefetched_blocks == 0, "five of the six free blocks"
        await stack.worker.on_engine(lambda: [pool.release(block) for block in held])
        await stack.router.one("first_step", 1)
        await stack.router.cancel(1)


async def turns_of_the_prefetcher(stack: TierStack) -> None:
    """Until it has asked what is due three times more: once it has, it has dealt with what was due before."""
    sessions = stack.worker.pool.order.sessions
    for price in (0.5, 0.6, 0.7):
        await stack.worker.on_engine(lambda price=price: setattr(sessions, "file_price", price))
        await eventually(lambda price=price: sessions.file_price != price)


async def test_files_outlive_their_process_unless_unwritable(tmp_path: Path) -> None:
    async with tier_stack(tmp_path) as stack:
        assert stack.tier.outlives_process
        stack.faults.failing["write"] = errno.ENOSPC
        await stack.worker.cache(HASHES)
        await eventually(lambda: not stack.tier.outlives_process)
        stack.faults.failing.clear()


def test_host_memory_ends_with_its_process() -> None:
    store = TierStore(MemoryDisk(), "w-0", FORMAT, 1000 * FORMAT.record_bytes)
    pool = BlockCopier(torch.zeros(BLOCKS * BLOCK_BYTES, dtype=torch.uint8), PoolShape(BLOCKS, BLOCK_BYTES))
    tier = KvTier(store, pool, RestoreOptions(BLOCK_TOKENS, BLOCK_BYTES), memory=store)
    store.open()
    try:
        assert not tier.outlives_process
    finally:
        store.close()
