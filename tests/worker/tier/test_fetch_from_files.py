"""Blocks in files of a directory that a prefill worker does not read: they come through a worker that does."""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.protos import session_pb2
from tests.fixtures.session_client import SessionClient, eventually
from tests.fixtures.tier_stack import TierStack, tier_stack
from tests.fixtures.worker_stack import BLOCK_BYTES, BLOCKS, PrefillStack, prompt_command, running

HASHES = [hashlib.sha256(bytes([index])).digest() for index in range(5)]
TOKENS = 22  # five complete blocks of four, and two tokens


class Pair:
    """`holder` has all blocks of a prompt in files and none in its pool; `asking` has neither."""

    def __init__(self, holder: TierStack, asking: PrefillStack, router: SessionClient, kv: list[bytes]) -> None:
        self.holder, self.asking, self.router, self.kv = holder, asking, router, kv

    async def ask(self, attempt_id: int, loaded_blocks: int = 5) -> Any:
        """The timings of a prompt that is told where its blocks are."""
        hint = session_pb2.Fetch(
            endpoint=self.holder.worker.endpoint,
            transfer_id=secrets.token_bytes(16),
            blocks=5,
            loaded_blocks=loaded_blocks,
            load_bytes_per_s=1e9,
        )
        command = prompt_command(attempt_id, secrets.token_bytes(16), tokens=TOKENS, block_hashes=HASHES, fetch=hint)
        await self.router.send(prefill=command)
        timings = (await self.router.one("first_step", attempt_id)).timings
        await self.router.cancel(attempt_id)
        return timings

    async def forget(self) -> None:
        """What the asking worker has in its pool."""
        pool = self.asking.pool
        await eventually(lambda: self.asking.counts.held == 0)
        await self.asking.on_engine(lambda: [pool.release(block) for block in pool.allocate(BLOCKS)])

    async def fetched_kv(self) -> list[bytes]:
        own = await self.asking.on_engine(lambda: self.asking.pool.touch(HASHES))
        rows = self.asking.memory.tensor.view(BLOCKS, BLOCK_BYTES)
        return [bytes(rows[block].numpy()) for block in own]


@asynccontextmanager
async def pair(directory: Path, always: bool = True, **asking: Any) -> AsyncIterator[Pair]:
    async with (
        tier_stack(directory, always=always) as holder,
        running(PrefillStack(**asking)) as other,
        SessionClient(other.endpoint) as router,
    ):
        published = await holder.publish(HASHES)
        kv = [holder.block_bytes(block) for block in published]
        await holder.forget()
        yield Pair(holder, other, router, kv)
        await eventually(lambda: not other.service.busy)


@pytest.mark.parametrize("transport", ["shared_memory", "tcp", "grpc"])
async def test_file_blocks_of_another_worker_are_loaded_there_and_copied_bit_for_bit(
    tmp_path: Path, transport: Any
) -> None:
    async with pair(tmp_path, transport=transport) as both:
        timings = await both.ask(1)
        assert (timings.fetched_tokens, timings.cached_tokens, timings.restored_tokens) == (20, 20, 0)
        assert timings.fetch_transport == transport
        assert await both.fetched_kv() == both.kv
        assert both.holder.tier.state.hit_blocks == 5


async def test_pool_blocks_of_the_holder_are_not_loaded_again(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        await both.ask(1)
        loaded_bytes = both.holder.tier.state.loaded_bytes
        await both.forget()
        assert (await both.ask(2)).fetched_tokens == 20
        assert both.holder.tier.state.loaded_bytes == loaded_bytes


async def test_prefill_worker_that_asks_for_the_pool_alone_is_given_that(tmp_path: Path) -> None:
    """As an older one does, which knows nothing of files."""
    async with pair(tmp_path) as both:
        timings = await both.ask(1, loaded_blocks=0)
        assert (timings.fetched_tokens, timings.cached_tokens) == (0, 0)
        assert both.holder.tier.state.loaded_bytes == 0


async def test_damaged_files_give_the_part_before_the_damage(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        [path] = tmp_path.rglob("*.kv")
        raw = bytearray(path.read_bytes())
        raw[64 + 2 * (64 + BLOCK_BYTES) + 64 + 3] ^= 4
        path.write_bytes(raw)
        assert (await both.ask(1)).fetched_tokens == 8


async def test_disk_that_hangs_delays_the_prompt_no_longer_than_a_fetch_may_take(tmp_path: Path) -> None:
    async with pair(tmp_path, fetch_timeout_s=0.2) as both:
        both.holder.gate.shut()
        timings = await both.ask(1)
        assert (timings.fetched_tokens, timings.cached_tokens) == (0, 0)
        assert 200.0 <= timings.fetch_ms < 5000.0
        await eventually(lambda: both.asking.counts.held == 0)
        both.holder.gate.open.set()
        await eventually(lambda: both.holder.worker.counts.held == 0)


async def test_prompt_cancelled_during_a_fetch_holds_no_block_on_either_side(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        both.holder.gate.shut()
        asked = asyncio.create_task(both.ask(1))
        await asyncio.to_thread(both.holder.gate.reached.wait, 10.0)
        await both.router.cancel(1)
        await eventually(lambda: not both.asking.service.busy)
        both.holder.gate.open.set()
        await eventually(lambda: both.asking.counts.held == 0 and both.holder.worker.counts.held == 0)
        asked.cancel()
        assert both.asking.runner.plans == []


async def test_holder_that_computes_sooner_than_it_loads_gives_its_pool_blocks(tmp_path: Path) -> None:
    async with pair(tmp_path, always=False) as both:
        await both.ask(1)  # nothing is known yet, so it loads
        await both.holder.forget()
        for _ in range(200):
            both.holder.worker.rate.observe(400_000, 0.01)
        await both.forget()
        assert (await both.ask(2)).fetched_tokens == 0
