"""In a conversation's second turn, the prefill worker fetches the KV of the first answer from the decode worker."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.client import AsyncBatonClient, Completion
from tests.e2e.conftest import run
from tests.e2e.oracle import greedy
from tests.e2e.stack import Stack, make_stack

BLOCK = 32
PROMPT, ANSWER, QUESTION = 70, 96, 60  # tokens
TRACE_WRITTEN_S = 30.0


@pytest.fixture(scope="module")
def fetching(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """1P+1D; the prefill worker fetches KV even if computing is faster, as it is with so small a model."""
    stack = make_stack(tmp_path_factory.mktemp("fetching"), tiny_llama, router_flags=["--no-prefill-worker", "queue"])
    stack.processes["prefill-0"].command += ["--fetch", "always", "--fetch-timeout-s", "30"]
    yield from run(stack)


async def ask(stack: Stack, prompt: list[int]) -> Completion:
    async with AsyncBatonClient(stack.target, timeout_s=30) as baton:
        return await baton.complete(prompt, max_tokens=ANSWER, ignore_eos=True)


def turns(seed: int) -> tuple[list[int], list[int]]:
    drawn = random.Random(seed)
    return [drawn.randrange(3, 500) for _ in range(PROMPT)], [drawn.randrange(3, 500) for _ in range(QUESTION)]


def check_exact(folder: Path, prompt: list[int], answer: Completion) -> None:
    """Check that transformers answers the same."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    tokens = list(answer.choices[0].token_ids)
    assert tokens == greedy(model, prompt, tokens, ANSWER)


def fetches(stack: Stack) -> list[dict[str, Any]]:
    """Return the attributes of all fetches in the trace."""
    return [span["attributes"] for span in stack.spans() if span["name"] == "prefill.fetch"]


async def test_first_answers_blocks_are_fetched_and_change_no_token(fetching: Stack, tiny_llama: Path) -> None:
    prompt, question = turns(seed=1)
    first = await ask(fetching, prompt)
    answer = list(first.choices[0].token_ids)
    second = await ask(fetching, [*prompt, *answer, *question])
    check_exact(tiny_llama, [*prompt, *answer, *question], second)

    complete_blocks = (PROMPT + ANSWER - 1) // BLOCK  # the last token has no KV
    assert second.usage.cached_tokens == complete_blocks * BLOCK
    await asyncio.to_thread(
        fetching.wait_for, lambda: len(fetches(fetching)) == 1, TRACE_WRITTEN_S, "fetch in the trace"
    )
    [fetch] = fetches(fetching)
    assert fetch["baton.fetch.tokens"] == (complete_blocks - PROMPT // BLOCK) * BLOCK
    assert fetch["baton.fetch.bytes"] > 0
    assert fetch["baton.fetch.transport"] == "shared_memory"
    assert second.timings.prefill_fetch_ms > 0.0
    await asyncio.to_thread(fetching.wait_idle)


async def test_decode_worker_that_died_between_the_turns_costs_only_computing(
    fetching: Stack, tiny_llama: Path
) -> None:
    prompt, question = turns(seed=2)
    answer = list((await ask(fetching, prompt)).choices[0].token_ids)
    before = len(fetches(fetching))
    fetching.processes["decode-0"].kill()
    fetching.processes["decode-0"].start()
    second = await ask(fetching, [*prompt, *answer, *question])
    check_exact(tiny_llama, [*prompt, *answer, *question], second)
    assert second.usage.cached_tokens == PROMPT // BLOCK * BLOCK
    assert all(fetch["baton.fetch.tokens"] == 0 for fetch in fetches(fetching)[before:])
    await asyncio.to_thread(fetching.wait_ready)
    await asyncio.to_thread(fetching.wait_idle)
