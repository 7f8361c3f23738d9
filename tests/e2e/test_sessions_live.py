"""On a real stack with small pools, the KV of a session is kept for its next turn, whatever comes between."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.client import AsyncBatonClient, Completion
from tests.e2e.conftest import run
from tests.e2e.stack import Stack, make_stack

BLOCK = 32
TURN = 8 * BLOCK
OTHERS = 12


@pytest.fixture(scope="module")
def small_pools(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Decode worker that computes prompts itself, with 32 blocks, so that four prompts evict all others."""
    flags = ["--kv-memory", "1MiB", "--max-model-len", "512"]
    yield from run(make_stack(tmp_path_factory.mktemp("sessions"), tiny_llama, prefill=0, worker_flags=flags))


@pytest.fixture
def two_workers(tiny_llama: Path, tmp_path: Path) -> Iterator[Stack]:
    """Two decode workers that compute prompts themselves: only the worker that answers has the prompt's blocks."""
    yield from run(make_stack(tmp_path / "stack", tiny_llama, prefill=0, decode=2))


def prompt(seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(3, 500) for _ in range(TURN)]


async def ask(baton: AsyncBatonClient, seed: int, **session: Any) -> Completion:
    return await baton.complete(prompt(seed), max_tokens=4, temperature=0.0, ignore_eos=True, **session)


async def cached_after_others(stack: Stack, seed: int, **session: Any) -> int:
    """Return the cached tokens of a prompt at its second turn, after many other prompts."""
    async with AsyncBatonClient(stack.target, timeout_s=30) as baton:
        await ask(baton, seed, **session)
        for other in range(OTHERS):
            await ask(baton, 1000 * seed + other)
        return (await ask(baton, seed, **session)).usage.cached_tokens


def total_blocks(stack: Stack) -> int:
    [worker] = stack.status().workers
    assert worker.load is not None
    return worker.load.pages.total


async def test_only_blocks_of_live_sessions_are_kept(small_pools: Stack) -> None:
    blocks = await asyncio.to_thread(total_blocks, small_pools)
    assert 2 * (TURN // BLOCK + 1) <= blocks < OTHERS * TURN // BLOCK  # the session fits half of the blocks
    assert await cached_after_others(small_pools, 1) == 0
    assert await cached_after_others(small_pools, 2, session_id="agent") == TURN - BLOCK
    assert await cached_after_others(small_pools, 3, session_id="other", done=True) == 0
    assert await cached_after_others(small_pools, 4, session_id="short", keep_for_s=0.0) == 0


async def answered_by(baton: AsyncBatonClient, pid: int) -> int:
    """Send prompts without a session until this worker answers one, and return the seed of that prompt."""
    for seed in range(2, 62):
        answer = await ask(baton, seed)
        if answer.timings.decode_pid == pid:
            return seed
    raise AssertionError("the other worker gets every prompt")


async def test_kept_session_blocks_move_when_their_worker_drains(two_workers: Stack) -> None:
    async with AsyncBatonClient(two_workers.target, timeout_s=30) as baton:
        first = await ask(baton, 1, session_id="agent", keep_for_s=600.0)
        pid = first.timings.decode_pid
        other = await answered_by(baton, pid)
        [draining] = [each for each in two_workers.processes.values() if each.runs and each.pid == pid]
        assert await asyncio.to_thread(draining.stop) == 0
        again = await ask(baton, 1, session_id="agent")
        assert again.timings.decode_pid != pid
        assert again.usage.cached_tokens == TURN - BLOCK
        assert again.choices[0].token_ids == first.choices[0].token_ids
        assert (await ask(baton, other)).usage.cached_tokens == 0
