"""A prompt whose blocks lie in files: loaded and put to use, or else computed as without them."""

import asyncio
import errno
import hashlib
from pathlib import Path

import pytest

from baton.protos import cache_pb2
from baton.worker.tier.restorer import EngineView
from tests.fixtures.session_client import eventually
from tests.fixtures.tier_stack import TierStack, tier_stack
from tests.fixtures.worker_stack import BLOCK_BYTES, BLOCK_TOKENS

HASHES = [hashlib.sha256(bytes([index])).digest() for index in range(5)]
TOKENS = 22  # five complete blocks of four, and two tokens


async def computed_from(stack: TierStack) -> list[int]:
    """Where each chunk began that was computed."""
    return [chunk.start for plan in stack.worker.runner.plans for chunk in plan.chunks]


async def test_evicted_blocks_are_restored_bit_for_bit_and_the_rest_computed(tmp_path: Path) -> None:
    async with tier_stack(tmp_path) as stack:
        published = await stack.publish(HASHES)
        before = [stack.block_bytes(block) for block in published]
        await stack.forget()
        timings = await stack.ask(1, HASHES, TOKENS)
        assert (timings.restored_tokens, timings.cached_tokens, timings.fetched_tokens) == (20, 20, 0)
        assert 0.0 < timings.restore_ms <= timings.queue_ms
        assert await computed_from(stack) == [20]
        own = await stack.worker.on_engine(lambda: stack.worker.pool.touch(HASHES))
        assert [stack.block_bytes(block) for block in own] == before
        assert stack.tier.state.hit_blocks == stack.tier.state.queried_blocks == 5


async def test_file_blocks_are_restored_in_a_new_process(tmp_path: Path) -> None:
    async with tier_stack(tmp_path) as stack:
        published = await stack.publish(HASHES)
        before = [stack.block_bytes(block) for block in published]
    async with tier_stack(tmp_path) as stack:
        stack.worker.memory.tensor.zero_()
        timings = await stack.ask(1, HASHES, TOKENS)
        assert (timings.restored_tokens, timings.cached_tokens) == (20, 20)
        own = await stack.worker.on_engine(lambda: stack.worker.pool.touch(HASHES))
        assert [stack.block_bytes(block) for block in own] == before


async def test_pool_blocks_are_not_loaded(tmp_path: Path) -> None:
    async with tier_stack(tmp_path, evicted=HASHES) as stack:
        await stack.worker.cache(HASHES[:3])
        await eventually(lambda: stack.worker.service.cache.sum.blocks == 3)
        timings = await stack.ask(1, HASHES, TOKENS)
        assert (timings.restored_tokens, timings.cached_tokens) == (8, 20)
        timings = await stack.ask(2, HASHES, TOKENS)
        assert (timings.restored_tokens, timings.restore_ms, timings.cached_tokens) == (0, 0.0, 20)


async def test_blocks_of_another_salt_have_other_names_and_are_not_found(tmp_path: Path) -> None:
    async with tier_stack(tmp_path, evicted=HASHES) as stack:
        others = [hashlib.sha256(b"salted" + each).digest() for each in HASHES]
        assert (await stack.ask(1, others, TOKENS)).cached_tokens == 0
        assert (stack.tier.state.queried_blocks, stack.tier.state.hit_blocks) == (5, 0)


async def test_block_of_the_last_prompt_token_is_never_loaded(tmp_path: Path) -> None:
    async with tier_stack(tmp_path, evicted=HASHES) as stack:
        assert (await stack.ask(1, HASHES[:4], 16)).restored_tokens == 12


async def test_prompt_with_requested_scores_is_computed(tmp_path: Path) -> None:
    async with tier_stack(tmp_path, evicted=HASHES) as stack:
        await stack.send(1, HASHES, TOKENS, sampling={"prompt_logprobs": 1})
        timings = (await stack.router.one("first_step", 1)).timings
        await stack.router.cancel(1)
        assert (timings.restored_tokens, timings.cached_tokens) == (0, 0)


async def test_damaged_block_ends_the_load_and_the_rest_is_computed(tmp_path: Path) -> None:
    async with tier_stack(tmp_path, evicted=HASHES) as stack:
        [path] = tmp_path.rglob("*.kv")
        raw = bytearray(path.read_bytes())
        raw[64 + 2 * (64 + BLOCK_BYTES) + 64 + 3] ^= 4
        path.write_bytes(raw)
        timings = await stack.ask(1, HASHES, TOKENS)
        assert (timings.restored_tokens, timings.cached_tokens) == (8, 8)
        assert await computed_from(stack) == [8, 16]
        assert stack.tier.state.corrupt_blocks == 1


async def test_disk_that_fails_costs_computing_and_is_tried_again_later(tmp_path: Path) -> None:
    async with tier_stack(tmp_path, evicted=HASHES) as stack:
        stack.faults.failing["read"] = errno.EIO
        assert (await stack.ask(1, HASHES, TOKENS)).cached_tokens == 0
        assert not stack.tier.state.reads
        assert not stack.tier.restorer.has_more(HASHES), "nothing is tried during a pause"
        stack.faults.failing.clear()
        await stack.publish(HASHES)
        await stack.forget()
        await eventually(lambda: stack.tier.restorer.has_more(HASHES))
        assert (await stack.ask(2, HASHES, TOKENS)).restored_tokens == 20
        assert stack.tier.state.reads


async def fail_to_read(stack: TierStack) -> None:
    """Reading is off, and fails whenever it is tried."""
    await stack.publish(HASHES)
    await stack.forget()
    stack.faults.failing["read"] = errno.EIO
    await stack.ask(1, HASHES, TOKENS)


async def test_reading_is_tried_again_though_no_prompt_wants_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.kvtransfer.tier.health.FIRST_PAUSE_S", 0.01)
    async with tier_stack(tmp_path) as stack:
        await fail_to_read(stack)
        await eventually(lambda: stack.tier.restorer.health.failures >= 4)
        assert not stack.tier.state.reads
        stack.faults.failing.clear()
        await eventually(lambda: stack.tier.state.reads)


async def test_try_that_hangs_fails_and_counts_when_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.kvtransfer.tier.health.FIRST_PAUSE_S", 0.01)
    async with tier_stack(tmp_path) as stack:
        await fail_to_read(stack)
        stack.gate.shut()
        assert await asyncio.to_thread(stack.gate.reached.wait, 10.0)
        stack.faults.failing.clear()
        failures = stack.tier.restorer.health.failures
        await eventually(lambda: stack.tier.restorer.health.failures > failures)
        assert not stack.tier.state.reads
        stack.gate.open.set()
        await eventually(lambda: stack.tier.state.reads)


async def test_tries_end_with_the_engine_and_begin_again_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.kvtransfer.tier.health.FIRST_PAUSE_S", 0.01)
    async with tier_stack(tmp_path) as stack:
        restorer = stack.tier.restorer
        await fail_to_read(stack)
        await restorer.detach()
        assert not [task for task in asyncio.all_tasks() if "_retry" in repr(task)]
        stack.faults.failing.clear()
        assert not stack.tier.state.reads
        restorer.attach(EngineView(stack.worker.loop, stack.worker.service.cache.knows, lambda: None))
        await eventually(lambda: stack.tier.state.reads)


async def test_read_that_hangs_delays_a_prompt_no_longer_than_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tier_stack(tmp_path) as stack:
        monkeypatch.setattr("baton.worker.tier.policy.LONGEST_WAIT_S", 0.05)
        monkeypatch.setattr("baton.worker.tier.policy.LEAST_WAIT_S", 0.05)
        monkeypatch.setattr("baton.worker.tier.restorer.OVERDUE_S", 0.05)
        await stack.publish(HASHES)
        await stack.forget()
        stack.gate.shut()
        timings = await stack.ask(1, HASHES, TOKENS)
        assert (timings.restored_tokens, timings.cached_tokens) == (0, 0)
        assert not stack.tier.state.reads
        await eventually(lambda: stack.worker.counts.held == 5)  # these may still be written to
        stack.gate.open.set()
        await eventually(lambda: stack.worker.counts.held == 0)
        await eventually(lambda: stack.tier.state.reads)


async def test_prompt_cancelled_during_a_load_holds_no_block(tmp_path: Path) -> None:
    async with tier_stack(tmp_path, evicted=HASHES) as stack:
        stack.gate.shut()
        await stack.send(1, HASHES, TOKENS)
        await asyncio.to_thread(stack.gate.reached.wait, 10.0)
        await stack.router.cancel(1)
        await eventually(lambda: not stack.worker.service.busy)
        stack.gate.open.set()
        await eventually(lambda: stack.worker.counts.held == 0)
        assert stack.worker.runner.plans == []


async def test_two_prompts_with_one_prefix_load_it_once(tmp_path: Path) -> None:
    async with tier_stack(tmp_path, evicted=HASHES) as stack:
        stack.gate.shut()
        for attempt_id in (1, 2):
            await stack.send(attempt_id, HASHES, TOKENS)
        await asyncio.to_thread(stack.gate.reached.wait, 10.0)
        stack.gate.open.set()
        timings = [(await stack.router.one("first_step", attempt_id)).timings for attempt_id in (1, 2)]
        assert sorted(each.restored_tokens for each in timings) == [0, 20]
        assert {each.cached_tokens for each in timings} == {20}
        assert stack.tier.state.loaded_bytes == 5 * BLOCK_BYTES
        for attempt_id in (1, 2):
            await stack.router.cancel(attempt_id)


async def test_where_computing_is_known_to_be_sooner_nothing_is_loaded(tmp_path: Path) -> None:
    async with tier_stack(tmp_path, always=False, evicted=HASHES) as stack:
        assert (await stack.ask(1, HASHES, TOKENS)).restored_tokens == 20, "nothing is known yet"
        await stack.forget()
        for _ in range(200):
            stack.worker.rate.observe(BLOCK_TOKENS * 100_000, 0.01)
        assert (await stack.ask(2, HASHES, TOKENS)).restored_tokens == 0


async def test_pool_without_room_computes_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.worker.tier.restorer.ROOM_S", 0.05)
    async with tier_stack(tmp_path, evicted=HASHES) as stack:
        held = await hold_all_but(stack, 3)
        await stack.send(1, HASHES, TOKENS)
        await eventually(lambda: stack.worker.loop.load.waiting_sequences == 1)
        await let_go(stack, held)
        assert (await stack.router.one("first_step", 1)).timings.restored_tokens == 0
        await stack.router.cancel(1)


async def test_blocks_are_loaded_once_there_is_capacity(tmp_path: Path) -> None:
    async with tier_stack(tmp_path, evicted=HASHES) as stack:
        held = await hold_all_but(stack, 3)
        await stack.send(1, HASHES, TOKENS)
        await eventually(lambda: stack.tier.restorer.busy)
        assert stack.worker.loop.load.waiting_sequences == 0
        await let_go(stack, held)
        assert (await stack.router.one("first_step", 1)).timings.restored_tokens == 20
        await stack.router.cancel(1)


async def test_nothing_is_loaded_before_the_prompts_that_are_queued_have_begun(tmp_path: Path) -> None:
    """Its blocks would be evicted for them again."""
    async with tier_stack(tmp_path, evicted=HASHES) as stack:
        held = await hold_all_but(stack, 6)
        await stack.send(1, [], tokens=30)  # seven blocks and a half: it waits
        await eventually(lambda: stack.worker.loop.load.waiting_sequences == 1)
        await stack.send(2, HASHES, TOKENS)
        await eventually(lambda: stack.tier.restorer.busy)
        await stack.worker.on_engine(lambda: None)
        assert stack.tier.state.hit_blocks == 0, "there was room for five, and another prompt was before it"
        await let_go(stack, held)
        await stack.router.one("first_step", 1)
        assert (await stack.router.one("first_step", 2)).timings.restored_tokens == 20
        for attempt in (1, 2):
            await stack.router.cancel(attempt)


async def hold_all_but(stack: TierStack, blocks: int) -> list[int]:
    """Once the engine has reported it: by that, the restorer knows whether there is room."""
    pool, loop = stack.worker.pool, stack.worker.loop
    held: list[int] = await stack.worker.on_engine(lambda: pool.allocate(pool.available - blocks))
    await eventually(lambda: loop.load.pages.free + loop.load.pages.cached == blocks)
    return held


async def let_go(stack: TierStack, held: list[int]) -> None:
    await stack.worker.on_engine(lambda: [stack.worker.pool.release(block) for block in held])


async def test_state_is_reported_to_routers(tmp_path: Path) -> None:
    async with tier_stack(tmp_path) as stack:
        await stack.publish(HASHES)
        stack.worker.service.report()
        await eventually(lambda: stack.router.of_kind("report"))
        report = stack.router.of_kind("report")[-1]
        assert (report.tier.blocks, report.tier.reads, report.tier.writes) == (5, True, True)
        assert report.tier.size_bytes == 64 + 5 * (64 + BLOCK_BYTES)


async def test_files_are_announced_to_routers_and_all_of_them_on_demand(tmp_path: Path) -> None:
    async with tier_stack(tmp_path) as stack:
        await stack.publish(HASHES)
        stack.worker.service.tell_files()
        await eventually(lambda: stack.router.of_kind("tier_events"))
        [events] = stack.router.of_kind("tier_events")
        [piece] = events.stored
        assert (events.sequence, piece.segment, piece.first_slot) == (1, 1, 0)
        assert piece.names == b"".join(each[:8] for each in HASHES)
        await stack.router.send(snapshot_request=cache_pb2.SnapshotRequest(tier=True))
        await eventually(lambda: stack.router.of_kind("tier_snapshot"))
        [snapshot] = stack.router.of_kind("tier_snapshot")
        assert (snapshot.sequence, snapshot.part, snapshot.parts) == (1, 0, 1)
        assert list(snapshot.stored) == [piece]
        assert stack.router.of_kind("cache_snapshot") == [], "of the pool only where that is asked for"
        stack.worker.service.report()
        await eventually(lambda: stack.router.of_kind("report"))
        tier = stack.router.of_kind("report")[-1].tier
        assert (len(tier.directory_id), tier.sequence, tier.block_bytes) == (16, 1, BLOCK_BYTES)
        assert tier.load_bytes_per_s == 0.0
        await stack.forget()
        await stack.ask(1, HASHES, TOKENS)
        assert stack.tier.state.load_bytes_per_s > 0.0
