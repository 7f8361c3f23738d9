"""Two routers over the same workers: a request that takes more than half of a worker is lent the rest of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from baton.client import AsyncBatonClient
from tests.fixtures.paged import random_prompt
from tests.fixtures.real_workers import BLOCK_TOKENS, BLOCKS, RealPair, real_pair
from tests.fixtures.routed import WAIT_S, reporting, routed
from tests.fixtures.waiting import eventually

LARGE = random_prompt(1650, seed=4)
SMALL_AT_ONCE = 3


@asynccontextmanager
async def two_routers(checkpoint: Path) -> AsyncIterator[tuple[RealPair, AsyncBatonClient, AsyncBatonClient]]:
    assert len(LARGE) > 0.8 * BLOCKS * BLOCK_TOKENS
    async with asyncio.timeout(3 * WAIT_S), real_pair(checkpoint) as pair, reporting(pair):
        workers = f"prefill@{pair.prefill_endpoint}", f"decode@{pair.to_decode.endpoint}"
        async with routed(*workers) as one, routed(*workers) as other:
            for client in (one, other):
                await client.complete([5] * 40, max_tokens=2, ignore_eos=True)  # its canary has passed
            yield pair, one, other


async def test_request_of_four_fifths_of_a_worker_is_answered(checkpoint: Path) -> None:
    async with two_routers(checkpoint) as (_, one, other):
        for client in (one, other, one):
            completion = await client.complete(LARGE, max_tokens=4, ignore_eos=True)
            assert len(completion.choices[0].token_ids) == 4


async def test_neither_large_nor_small_requests_starve(checkpoint: Path) -> None:
    """One router has a large request after the other, the second one always some small ones."""
    async with two_routers(checkpoint) as (_, one, other):
        answered, over = 0, asyncio.Event()

        async def keep_asking(which: int) -> None:
            nonlocal answered
            while not over.is_set():
                await other.complete([which + 5] * 40, max_tokens=30, ignore_eos=True)
                answered += 1

        asking = [asyncio.create_task(keep_asking(which)) for which in range(SMALL_AT_ONCE)]
        for _ in range(3):
            before = answered
            await one.complete(LARGE, max_tokens=4, ignore_eos=True)
            await eventually(lambda before=before: answered > before)
        over.set()
        await asyncio.gather(*asking)
