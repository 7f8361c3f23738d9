"""Sliding-window model on a stack with a disk tier: turns, kills and restarts do not change a token."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.client import AsyncBatonClient, Completion, Delta
from baton.text.block_groups import BlockGroups
from tests.e2e.conftest import run
from tests.e2e.held import answers_held, make_answers_holdable
from tests.e2e.oracle import greedy
from tests.e2e.stack import Stack, make_stack
from tests.e2e.test_tier_live import STORED_S, flags, is_stored, kill_all_workers
from tests.fixtures.checkpoints import make_checkpoint

BLOCK = 32
PROMPT, ANSWER, QUESTION = 10 * BLOCK + 6, 3 * BLOCK, 2 * BLOCK + 5
STREAMED = 12 * BLOCK  # far beyond a window of 32
GROUPS = BlockGroups(windowed=1)  # one group of blocks for all tokens, one for a window


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny-gemma3", "gemma3_text", seed=12)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def windowed(model: Path, directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """2P+1D; prefill workers fetch KV even if computing is faster, as it is with so small a model."""
    folder = tmp_path_factory.mktemp("windowed")
    away = ["--no-prefill-worker", "queue"]
    stack = make_stack(folder, model, prefill=2, worker_flags=flags(directory), router_flags=away)
    make_answers_holdable(stack)
    for name in ("prefill-0", "prefill-1"):
        stack.processes[name].command += ["--fetch", "always", "--fetch-timeout-s", "30"]
    yield from run(stack)


@pytest.fixture(scope="module")
def expected(model: Path) -> torch.nn.Module:
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    loaded.generation_config.eos_token_id = None
    return loaded


def tokens(seed: int, count: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(3, 500) for _ in range(count)]


async def ask(stack: Stack, prompt: list[int]) -> Completion:
    async with AsyncBatonClient(stack.target, timeout_s=60) as baton:
        return await baton.complete(prompt, max_tokens=ANSWER, temperature=0.0, ignore_eos=True)


async def test_second_turn_hits_the_first_and_equals_transformers(windowed: Stack, expected: torch.nn.Module) -> None:
    prompt, question = tokens(1, PROMPT), tokens(2, QUESTION)
    first = list((await ask(windowed, prompt)).choices[0].token_ids)
    assert first == greedy(expected, prompt, first, ANSWER)
    second = await ask(windowed, [*prompt, *first, *question])
    answer = list(second.choices[0].token_ids)
    assert answer == greedy(expected, [*prompt, *first, *question], answer, ANSWER)
    assert second.usage.cached_tokens == (PROMPT + ANSWER - 1) // BLOCK * BLOCK
    await asyncio.to_thread(windowed.wait_idle)


async def test_killed_decode_worker_costs_no_token_beyond_its_windows(
    windowed: Stack, expected: torch.nn.Module
) -> None:
    prompt, streamed, killed = tokens(3, PROMPT), list[int](), False
    async with AsyncBatonClient(windowed.target, timeout_s=60) as baton:
        with answers_held(windowed, STREAMED - BLOCK) as held:
            async for event in baton.generate(prompt, max_tokens=STREAMED, temperature=0.0, ignore_eos=True):
                streamed += event.token_ids if isinstance(event, Delta) else ()
                if len(streamed) >= STREAMED // 2 and not killed:
                    killed = True
                    windowed.processes["decode-0"].kill()
                    held.let_go()
                    windowed.processes["decode-0"].start()
    assert killed
    assert streamed == greedy(expected, prompt, streamed, STREAMED)
    await asyncio.to_thread(windowed.wait_ready)


async def test_prompt_and_windows_are_loaded_after_kill_9_of_all_workers(
    windowed: Stack, directory: Path, expected: torch.nn.Module
) -> None:
    prompt = tokens(4, PROMPT)
    first = await ask(windowed, prompt)
    await asyncio.to_thread(
        windowed.wait_for, lambda: is_stored(windowed, directory, prompt, GROUPS), STORED_S, "blocks in files"
    )
    await asyncio.to_thread(kill_all_workers, windowed)
    again = await ask(windowed, prompt)
    assert again.usage.cached_tokens == PROMPT // BLOCK * BLOCK
    assert again.choices[0].token_ids == first.choices[0].token_ids
    answer = list(again.choices[0].token_ids)
    assert answer == greedy(expected, prompt, answer, ANSWER)
