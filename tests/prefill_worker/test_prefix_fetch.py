"""A prompt whose beginning lies in another worker's cache: fetched and put to use, or else computed as without it."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from baton.protos import session_pb2
from tests.fixtures.loop_clock import put_forward
from tests.fixtures.session_client import SessionClient, eventually
from tests.fixtures.worker_stack import BLOCK_BYTES, BLOCKS, DecodeStack, PrefillStack, prompt_command, running

HASHES = [bytes([index]) * 32 for index in range(5)]
TOKENS = 22  # five complete blocks of four, and two tokens


class Pair:
    """A prefill worker with a router, and a decode worker that has the first four blocks of a prompt."""

    def __init__(self, prefill: PrefillStack, decode: DecodeStack, router: SessionClient, source: list[int]) -> None:
        self.prefill, self.decode, self.router, self.source = prefill, decode, router, source

    async def ask(self, attempt_id: int, endpoint: str = "", blocks: int = 4, **fields: Any) -> None:
        hint = session_pb2.Fetch(
            endpoint=endpoint or self.decode.endpoint, transfer_id=secrets.token_bytes(16), blocks=blocks
        )
        command = prompt_command(
            attempt_id, secrets.token_bytes(16), tokens=TOKENS, block_hashes=HASHES, fetch=hint, **fields
        )
        await self.router.send(prefill=command)

    async def timings(self, attempt_id: int) -> Any:
        """Of a prompt that was answered; it is let go of."""
        timings = (await self.router.one("first_step", attempt_id)).timings
        await self.router.cancel(attempt_id)
        return timings

    def hold_copies(self, monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
        """From now on a copy begins (first event) but goes on only when it is let go (second)."""
        begun, let_go, copy = asyncio.Event(), asyncio.Event(), self.prefill.peers.copy

        async def held(*arguments: Any) -> Any:
            begun.set()
            try:
                await let_go.wait()
            finally:  # as PullThread does: a cancelled copy ends only when it has
                copied = asyncio.ensure_future(let_go.wait())
                while not copied.done():
                    try:
                        await asyncio.shield(copied)
                    except asyncio.CancelledError:
                        continue
            return await copy(*arguments)

        monkeypatch.setattr(self.prefill.peers, "copy", held)
        return begun, let_go


@asynccontextmanager
async def pair(**options: Any) -> AsyncIterator[Pair]:
    async with (
        running(PrefillStack(**options)) as prefill,
        running(DecodeStack()) as decode,
        SessionClient(prefill.endpoint) as router,
    ):
        source = await decode.cache(HASHES[:4])
        yield Pair(prefill, decode, router, source)
        await eventually(lambda: not decode.pool._watches)
        await eventually(lambda: not prefill.service.busy)


@pytest.mark.parametrize("transport", ["shared_memory", "tcp", "grpc"])
async def test_blocks_are_fetched_bit_for_bit_and_only_the_rest_is_computed(transport: Any) -> None:
    async with pair(transport=transport) as both:
        both.decode.storage.copy_(torch.arange(BLOCKS * BLOCK_BYTES) % 241)
        await both.ask(1)
        timings = await both.timings(1)
        assert (timings.fetched_tokens, timings.cached_tokens) == (16, 16)
        assert (timings.fetch_bytes, timings.fetch_transport) == (4 * BLOCK_BYTES, transport)
        assert 0.0 < timings.fetch_ms <= timings.queue_ms
        assert [chunk.start for plan in both.prefill.runner.plans for chunk in plan.chunks] == [16]
        own = await both.prefill.on_engine(lambda: both.prefill.pool.watch(HASHES[:4]).blocks)
        pools = [stack.memory.tensor.view(BLOCKS, BLOCK_BYTES) for stack in (both.prefill, both.decode)]
        assert pools[0][list(own)].equal(pools[1][both.source])


async def test_local_blocks_are_not_fetched() -> None:
    async with pair() as both:
        await both.prefill.cache(HASHES[:3])
        await both.ask(1)
        timings = await both.timings(1)
        assert (timings.fetched_tokens, timings.fetch_bytes, timings.cached_tokens) == (4, BLOCK_BYTES, 16)
        await both.ask(2)
        timings = await both.timings(2)
        assert (timings.fetched_tokens, timings.cached_tokens) == (0, 20)


async def test_source_with_less_than_expected_gives_what_it_has() -> None:
    async with pair() as both:
        await both.ask(1, blocks=5)
        assert (await both.timings(1)).fetched_tokens == 16


async def test_block_of_the_last_prompt_token_is_never_fetched() -> None:
    async with pair() as both:
        hint = session_pb2.Fetch(endpoint=both.decode.endpoint, transfer_id=secrets.token_bytes(16), blocks=4)
        command = prompt_command(1, secrets.token_bytes(16), tokens=16, block_hashes=HASHES[:4], fetch=hint)
        await both.router.send(prefill=command)
        assert (await both.timings(1)).fetched_tokens == 12


async def test_source_without_blocks_costs_only_a_query() -> None:
    async with pair() as both:
        await both.decode.on_engine(lambda: [both.decode.pool.release(b) for b in both.decode.pool.allocate(BLOCKS)])
        await both.ask(1)
        timings = await both.timings(1)
        assert (timings.fetched_tokens, timings.cached_tokens) == (0, 0)
        assert timings.fetch_ms > 0.0


async def test_unreachable_source_is_avoided_for_a_while() -> None:
    async with pair() as both:
        await both.ask(1, endpoint="127.0.0.1:1")
        first = await both.timings(1)
        await both.ask(2, endpoint="127.0.0.1:1")
        second = await both.timings(2)
        assert first.fetch_ms > 0.0 and first.cached_tokens == 0
        assert second.fetch_ms == 0.0


async def test_block_overwritten_during_its_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as both:
        begun, let_go = both.hold_copies(monkeypatch)
        await both.ask(1)
        await begun.wait()
        await both.decode.on_engine(lambda: [both.decode.pool.release(b) for b in both.decode.pool.allocate(BLOCKS)])
        let_go.set()
        timings = await both.timings(1)
        assert (timings.fetched_tokens, timings.cached_tokens) == (0, 0)


async def test_prompt_does_not_wait_for_a_slow_copy_and_its_pages_are_freed_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pair(fetch_timeout_s=60.0) as both:
        begun, let_go = both.hold_copies(monkeypatch)
        await both.ask(1, time_left_ms=300_000)
        await begun.wait()
        put_forward(60.0)
        assert (await both.timings(1)).cached_tokens == 0
        await eventually(lambda: not both.prefill.service.busy and both.prefill.counts.held == 4)
        assert both.prefill.scheduler.batch.held_by_transfers == 4
        let_go.set()
        await both.prefill.all_free()
        assert both.prefill.counts.cached == 5  # the prompt's own; of the fetch nothing


async def test_cancel_while_fetching_gives_the_pages_back_once_the_copy_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pair() as both:
        begun, let_go = both.hold_copies(monkeypatch)
        await both.ask(1)
        await begun.wait()
        await both.router.cancel(1)
        await eventually(lambda: not both.prefill.service.busy)
        assert both.prefill.counts.held == 4
        let_go.set()
        await both.prefill.all_free()
        assert not both.prefill.runner.plans and not both.router.about("first_step", 1)


async def test_cancel_while_the_engine_is_asked_for_pages_leaks_none() -> None:
    async with pair() as both:
        both.prefill.runner.hold()
        await both.router.send(prefill=prompt_command(1, secrets.token_bytes(16)))
        await eventually(both.prefill.runner.stepping.is_set)
        await both.ask(2)
        await eventually(lambda: both.prefill.loop._thread._calls.qsize())
        await both.router.cancel(2)
        await both.router.cancel(1)
        await eventually(lambda: not both.prefill.service.busy)
        both.prefill.runner.let_go()


async def test_deadline_counts_while_fetching(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as both:
        _, let_go = both.hold_copies(monkeypatch)
        await both.ask(1, time_left_ms=50)
        assert (await both.router.one("failed", 1)).reason == session_pb2.FAILURE_REASON_DEADLINE
        let_go.set()


async def test_without_room_for_the_blocks_nothing_is_fetched() -> None:
    async with pair() as both:
        taken = await both.prefill.on_engine(lambda: both.prefill.pool.allocate(BLOCKS - 3))
        await both.ask(1)
        await eventually(lambda: both.prefill.loop.load.waiting_sequences == 1)
        await both.prefill.on_engine(lambda: [both.prefill.pool.release(block) for block in taken])
        timings = await both.timings(1)
        assert (timings.fetched_tokens, timings.cached_tokens) == (0, 0)


async def test_where_computing_is_sooner_nothing_is_fetched() -> None:
    async with pair(always_fetch=False) as both:
        both.prefill.rate.observe(10**9, 1.0)
        await both.ask(1)
        assert (await both.timings(1)).cached_tokens == 0
        assert len(both.decode.table) == 0


async def test_prompt_with_requested_logprobs_is_computed() -> None:
    async with pair() as both:
        await both.ask(1, sampling={"prompt_logprobs": 0})
        timings = await both.timings(1)
        assert (timings.fetch_ms, timings.cached_tokens) == (0.0, 0)


async def test_report_says_how_much_of_all_prompts_was_found_here() -> None:
    async with pair() as both:
        await both.ask(1)
        await both.timings(1)

        def is_reported() -> bool:
            """What the engine has counted may follow what it has made."""
            both.prefill.service.report()
            reports = both.router.of_kind("report")[-1:]
            return [(each.cache_query_tokens, each.cache_hit_tokens) for each in reports] == [(TOKENS, 16)]

        await eventually(is_reported)
