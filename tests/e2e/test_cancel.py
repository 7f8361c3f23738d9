"""Requests that are cancelled in any phase leave no KV page held, on either worker."""

import asyncio
import random
from contextlib import aclosing

import pytest

from baton.client import AsyncBatonClient, DeadlineExceeded, Delta, RetryPolicy
from tests.e2e.stack import Stack

REQUESTS = 200
AT_ONCE = 25
LONGEST_S = 0.4
MOST_TOKENS = 100
ANSWER_TOKENS = 1000


async def give_up(baton: AsyncBatonClient, prompt: list[int], after_s: float, after_tokens: int) -> int:
    """Cancel a request after some time or some tokens; return how many tokens had arrived."""
    tokens = 0
    try:
        async with asyncio.timeout(after_s):
            async with aclosing(baton.generate(prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True)) as events:
                async for event in events:
                    if isinstance(event, Delta):
                        tokens += len(event.token_ids)
                    if tokens >= after_tokens:
                        break
    except TimeoutError:
        pass
    return tokens


async def test_cancelled_at_any_phase_all_pages_are_free_again(stack: Stack) -> None:
    draw = random.Random(200)
    line = asyncio.Semaphore(AT_ONCE)

    async def one(baton: AsyncBatonClient, number: int) -> int:
        """Cancel one request; every second one only after some tokens, so that it is being decoded."""
        prompt = [draw.randrange(3, 500) for _ in range(draw.choice((5, 60, 300, 900)))]
        async with line:
            if number % 2:
                return await give_up(baton, prompt, 60.0, draw.randint(1, MOST_TOKENS))
            return await give_up(baton, prompt, draw.uniform(0.0, LONGEST_S), ANSWER_TOKENS)

    async with AsyncBatonClient(stack.target) as baton:
        tokens = await asyncio.gather(*(one(baton, number) for number in range(REQUESTS)))
        await asyncio.to_thread(stack.wait_idle)
        after = await baton.complete([5, 6, 7], max_tokens=3, ignore_eos=True)

    assert all(1 <= each < ANSWER_TOKENS for each in tokens[1::2])
    assert 0 in tokens, "no request was cancelled before its first token"
    assert len(after.choices[0].token_ids) == 3
    await asyncio.to_thread(stack.wait_without_requests)


async def test_deadline_ends_a_request_and_frees_its_pages(stack: Stack) -> None:
    async with AsyncBatonClient(stack.target, timeout_s=0.5, retry=RetryPolicy(attempts=1)) as baton:
        with pytest.raises(DeadlineExceeded):
            await baton.complete([5, 6, 7], max_tokens=1900, n=4, temperature=1.0, ignore_eos=True)
    await asyncio.to_thread(stack.wait_idle)
