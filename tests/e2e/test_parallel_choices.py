"""A request with n choices on a real stack: same answers as n requests, with one prefill and one transfer."""

import asyncio
import random

from baton.client import AsyncBatonClient, Completion
from tests.e2e.stack import Stack
from tests.fixtures.seeds import seed_of_choice

CHOICES = 8
SEED = 2024
TRACE_WRITTEN_S = 30.0
PROMPT = [random.Random(8).randrange(3, 512) for _ in range(70)]


async def sample(baton: AsyncBatonClient, seed: int, n: int, cache_salt: str, max_tokens: int = 24) -> Completion:
    return await baton.complete(
        PROMPT, n=n, seed=seed, temperature=1.0, max_tokens=max_tokens, ignore_eos=True, cache_salt=cache_salt
    )


def spans_of(stack: Stack, max_tokens: int) -> list[str]:
    """Return the names of the spans of the request with that many tokens; empty until its trace is written."""
    spans = stack.spans()
    roots = [span["span_id"] for span in spans if span["attributes"].get("gen_ai.request.max_tokens") == max_tokens]
    return [span["name"] for span in spans if roots and span["parent_span_id"] == roots[-1]]


async def test_eight_choices_are_the_answers_of_eight_requests_with_the_choice_in_their_seed(stack: Stack) -> None:
    async with AsyncBatonClient(stack.target, timeout_s=60) as baton:
        together = await sample(baton, SEED, CHOICES, "together")
        seeds = [seed_of_choice(SEED, choice) for choice in range(CHOICES)]
        alone = await asyncio.gather(*(sample(baton, seed, 1, "alone") for seed in seeds))
    assert [choice.token_ids for choice in together.choices] == [answer.choices[0].token_ids for answer in alone]
    assert len({choice.token_ids for choice in together.choices}) == CHOICES


async def test_eight_choices_cost_one_prefill_and_one_transfer(stack: Stack) -> None:
    async with AsyncBatonClient(stack.target, timeout_s=60) as baton:
        one = await sample(baton, SEED, 1, "one")
        eight = await sample(baton, SEED, CHOICES, "eight", max_tokens=23)
    assert eight.timings.transfer_bytes == one.timings.transfer_bytes > 0
    await asyncio.to_thread(
        stack.wait_for, lambda: "detokenize" in spans_of(stack, 23), TRACE_WRITTEN_S, "trace of the choices"
    )
    names = spans_of(stack, 23)
    assert (names.count("prefill.chunk"), names.count("kv.transfer")) == (1, 1)
