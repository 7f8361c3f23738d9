"""A worker compares cached blocks before a prompt takes them: one that has changed is dropped with all behind it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch

from baton.engine.kv_cache.block_pool import CacheChanges, Watch
from baton.engine.runner.thread import EngineStopped
from baton.kvtransfer.checksum import Checksums
from baton.kvtransfer.slices import PoolShape
from baton.protos import kv_transfer_pb2, kv_transfer_pb2_grpc
from baton.text.block_groups import ONE_GROUP, BlockGroups
from baton.worker.at_rest.checker import MOST_BLOCKS, QUEUED_BLOCKS, CachedBlocks, RestChecker
from baton.worker.local_kv import LocalKv
from tests.fixtures.session_client import SessionClient, eventually
from tests.fixtures.worker_stack import BLOCK_BYTES, BLOCKS, PrefillStack, prompt_command, running

HASHES = [bytes([number]) * 32 for number in range(1, 6)]
TOKENS = 4 * len(HASHES) + 2


@dataclass
class RestStack:
    worker: PrefillStack
    router: SessionClient
    checker: RestChecker

    async def ask(self, attempt_id: int, hashes: Sequence[bytes] = HASHES) -> int:
        """Tokens that a prompt takes from the cache."""
        command = prompt_command(attempt_id, bytes([attempt_id]) * 16, tokens=TOKENS, block_hashes=hashes)
        await self.router.send(prefill=command)
        timings: Any = (await self.router.one("first_step", attempt_id)).timings
        await self.router.cancel(attempt_id)
        await eventually(lambda: self.worker.counts.held == 0)
        return int(timings.cached_tokens)

    async def summed(self) -> None:
        await eventually(lambda: len(self.checker._known) == self.worker.counts.cached)

    def flip(self, block: int) -> None:
        self.worker.memory.tensor[block * BLOCK_BYTES + 13] ^= 8


@asynccontextmanager
async def rest_stack(share: float = 1.0) -> AsyncIterator[RestStack]:
    checkers: list[RestChecker] = []

    def on_cache(changes: CacheChanges) -> None:
        worker.service.cache.on_changes(changes)
        for each in checkers:
            each.on_changes(changes)

    def make_kv(worker: PrefillStack) -> LocalKv:
        checker = RestChecker(Checksums(worker.memory.tensor, PoolShape(BLOCKS, BLOCK_BYTES)), share)
        checkers.append(checker)
        return LocalKv(at_rest=checker)

    worker = PrefillStack(on_cache=on_cache, make_kv=make_kv)
    async with running(worker), SessionClient(worker.endpoint) as router:
        (checker,) = checkers
        checker.attach(CachedBlocks(worker.loop, worker.service.cache.knows))
        try:
            yield RestStack(worker, router, checker)
            await worker.all_free()
            await eventually(lambda: not worker.pool._watches)
        finally:
            await checker.detach()
            checker.close()


async def test_blocks_that_have_not_changed_are_used() -> None:
    async with rest_stack() as stack:
        await stack.worker.cache(HASHES)
        await stack.summed()
        assert await stack.ask(1) == 20
        assert stack.checker.counters.checked_at_rest_blocks == len(HASHES)
        assert stack.checker.counters.corrupt_at_rest_blocks == 0


@pytest.mark.parametrize("place", range(len(HASHES)))
async def test_changed_block_is_dropped_with_its_descendants(place: int, caplog: pytest.LogCaptureFixture) -> None:
    async with rest_stack() as stack:
        blocks = await stack.worker.cache(HASHES)
        await stack.summed()
        stack.flip(blocks[place])
        with caplog.at_level(logging.ERROR):
            assert await stack.ask(1) == 4 * place
        assert [record.message for record in caplog.records if "cached KV is corrupt" in record.message] == [
            f"cached KV is corrupt: block {blocks[place]}; it and the blocks after it are recomputed"
        ]
        assert stack.checker.counters.corrupt_at_rest_blocks == 1
        await stack.summed()
        assert await stack.ask(2) == 20, "computed again, it is as good as any"
        assert stack.checker.counters.corrupt_at_rest_blocks == 1


async def test_sum_that_somebody_else_took_is_used() -> None:
    async with rest_stack() as stack:
        stack.checker._published._share = 0.0
        blocks = await stack.worker.cache(HASHES)
        await eventually(lambda: stack.worker.service.cache.sum.blocks == len(HASHES))
        whole = stack.checker._sum(blocks)
        assert stack.checker.take_sums([*zip(HASHES, whole, strict=True), (b"gone" * 8, 5)]) == frozenset()
        await stack.summed()  # of the cached ones alone
        stack.flip(blocks[2])
        assert await stack.ask(1) == 8


async def test_damage_that_somebody_else_summed_is_refused_and_dropped() -> None:
    """As by the writer of files: what has changed since it was published is not written."""
    async with rest_stack() as stack:
        blocks = await stack.worker.cache(HASHES)
        await stack.summed()
        stack.flip(blocks[3])
        sums = list(zip(HASHES, stack.checker._sum(blocks), strict=True))
        assert stack.checker.take_sums(sums) == {HASHES[3]}
        await eventually(lambda: stack.worker.service.cache.sum.blocks == 3)
        assert stack.checker.counters.corrupt_at_rest_blocks == 1
        assert await stack.ask(1) == 12


async def test_blocks_that_another_worker_asks_for_are_compared_first() -> None:
    async with rest_stack() as stack:
        blocks = await stack.worker.cache(HASHES)
        await stack.summed()
        stack.flip(blocks[1])
        async with grpc.aio.insecure_channel(stack.worker.endpoint) as channel:
            stub = kv_transfer_pb2_grpc.KvTransferServiceStub(channel)
            pool_id = stack.worker.transfers._description.pool_id
            asked = kv_transfer_pb2.OpenRequest(transfer_id=b"x" * 16, pool_id=pool_id, block_hashes=HASHES)
            call = stub.Open(asked)
            watermark: Any = await call.read()
            assert len(watermark.blocks) == 1, "those before the one that has changed"
            await stub.Close(kv_transfer_pb2.CloseRequest(transfer_id=asked.transfer_id))
        await eventually(lambda: not stack.worker.pool._watches)


async def test_changed_bytes_of_an_evicted_name_are_no_fault() -> None:
    async with rest_stack() as stack:
        pool = stack.worker.pool
        await stack.worker.cache(HASHES)
        await stack.summed()

        def forget() -> None:
            for block in pool.allocate(BLOCKS):
                pool.release(block)

        await stack.worker.on_engine(forget)
        stack.worker.memory.tensor.fill_(9)
        await stack.worker.cache(HASHES)
        assert await stack.ask(1) == 20
        assert stack.checker.counters.corrupt_at_rest_blocks == 0


async def test_block_given_away_while_it_is_summed_raises_no_alarm() -> None:
    """The bytes are another block's by then: nothing is wrong with them, and nothing is dropped."""
    watch, dropped = Watch((3,)), list[int]()
    asked = Future[list[Watch]]()
    asked.set_result([watch])

    def summed(block: int) -> int:
        watch.broken = True
        return 6

    loop = SimpleNamespace(watch_each=lambda names: asked, unwatch=lambda watch: None, distrust=dropped.extend)
    checker = RestChecker(SimpleNamespace(of=summed), 1.0)  # type: ignore[arg-type]
    try:
        checker.attach(CachedBlocks(loop, lambda name: True))  # type: ignore[arg-type]
        checker._known.learn(HASHES[0], 5)
        await checker.check(HASHES[:1])
        assert dropped == []
        assert checker.counters.checked_at_rest_blocks == 0
    finally:
        await checker.detach()
        checker.close()


async def test_where_nothing_is_drawn_nothing_is_compared() -> None:
    async with rest_stack(share=0.0) as stack:
        blocks = await stack.worker.cache(HASHES)
        await eventually(lambda: stack.worker.service.cache.sum.blocks == len(HASHES))
        stack.flip(blocks[0])
        assert await stack.ask(1) == 20
        assert (len(stack.checker._known), stack.checker.counters.checked_at_rest_blocks) == (0, 0)


async def test_cancelled_check_leaves_no_watch() -> None:
    async with rest_stack() as stack:
        await stack.worker.cache(HASHES)
        await stack.summed()
        checking = asyncio.create_task(stack.checker.check(HASHES))
        await asyncio.sleep(0)
        checking.cancel()
        await asyncio.wait([checking])
        assert checking.cancelled()
        await eventually(lambda: not stack.worker.pool._watches)


async def test_detached_checker_compares_nothing() -> None:
    async with rest_stack() as stack:
        await stack.worker.cache(HASHES)
        await stack.summed()
        await stack.checker.detach()
        assert len(stack.checker._known) == 0, "the next engine may have another pool"
        assert stack.checker.drawn(HASHES) == []
        await stack.checker.check(HASHES)
        stack.checker.on_changes(CacheChanges((b"x" * 32,), ()))
        assert stack.checker._working is None


async def test_stopped_engine_is_no_fault_of_the_prompt() -> None:
    async with rest_stack() as stack:
        await stack.worker.cache(HASHES)
        await stack.summed()

        def stopped(names: Sequence[bytes]) -> Any:
            raise EngineStopped("it has stopped")

        stack.checker.attach(CachedBlocks(SimpleNamespace(watch_each=stopped), lambda name: True))  # type: ignore[arg-type]
        await stack.checker.check(HASHES)


@asynccontextmanager
async def free_checker(share: float = 1.0) -> AsyncIterator[RestChecker]:
    """Its engine has every block, and answers no watch."""
    checker = RestChecker(Checksums(torch.zeros(8, dtype=torch.uint8), PoolShape(1, 8)), share)
    loop = SimpleNamespace(groups=ONE_GROUP, watch_each=lambda names: Future[list[Watch]](), unwatch=None)
    try:
        checker.attach(CachedBlocks(loop, lambda name: True))  # type: ignore[arg-type]
        yield checker
    finally:
        if checker._working is not None:
            checker._working.cancel()
        await checker.detach()
        checker.close()


async def test_prompt_waits_for_a_bounded_number_of_first_blocks() -> None:
    names = [bytes([number]) * 32 for number in range(MOST_BLOCKS + 1)]
    async with free_checker() as checker:
        assert checker.drawn(names) == names[:MOST_BLOCKS]


async def test_published_blocks_queue_up_to_a_bound_and_the_rest_is_not_compared() -> None:
    names = tuple(number.to_bytes(32, "little") for number in range(QUEUED_BLOCKS + 1))
    async with free_checker() as checker:
        checker.on_changes(CacheChanges(names[:-2], ()))
        checker.on_changes(CacheChanges(names[-2:], ()))
        assert checker._queue == list(names[:QUEUED_BLOCKS])
        await asyncio.sleep(0)
        assert checker._queue == list(names[MOST_BLOCKS:QUEUED_BLOCKS]), "the oldest are compared first"


@pytest.mark.parametrize("whole", (2, 0))
async def test_all_cached_blocks_of_a_model_with_windows_may_be_compared(whole: int) -> None:
    """A received prompt reuses a prefix without its windows, a computed prompt the blocks in its window."""
    groups = BlockGroups(whole, 1, window_tokens=8, block_tokens=4)
    there = {groups.name(each, group) for each in HASHES[:4] for group in range(whole)}
    there |= {groups.name(each, whole) for each in HASHES[2:4]}
    checker = RestChecker(Checksums(torch.zeros(8, dtype=torch.uint8), PoolShape(1, 8)), 1.0)
    try:
        checker.attach(CachedBlocks(SimpleNamespace(groups=groups), there.__contains__))  # type: ignore[arg-type]
        assert set(checker.drawn(HASHES)) == there
    finally:
        await checker.detach()
        checker.close()
