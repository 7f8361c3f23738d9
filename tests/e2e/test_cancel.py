"""Requests that are given up in any phase leave no page behind, on either worker."""

import asyncio
import random
from contextlib import aclosing

from client import AsyncBatonClient, Delta
from tests.e2e.stack import Stack

REQUESTS = 200
AT_ONCE = 25
LONGEST_S = 0.4


async def give_up_after(baton: AsyncBatonClient, prompt: list[int], seconds: float) -> int:
    """Returns how many tokens had come."""
    tokens = 0
    try:
        async with asyncio.timeout(seconds):
            async with aclosing(baton.generate(prompt, max_tokens=1000, ignore_eos=True)) as events:
                async for event in events:
                    if isinstance(event, Delta):
                        tokens += len(event.token_ids)
    except TimeoutError:
        pass
    return tokens


async def test_cancelled_at_any_phase_all_pages_are_free_within_a_second(stack: Stack) -> None:
    draw = random.Random(200)
    line = asyncio.Semaphore(AT_ONCE)

    async def one(baton: AsyncBatonClient) -> int:
        prompt = [draw.randrange(3, 500) for _ in range(draw.choice((5, 60, 300, 900)))]
        async with line:
            return await give_up_after(baton, prompt, draw.uniform(0.0, LONGEST_S))

    async with AsyncBatonClient(stack.target) as baton:
        tokens = await asyncio.gather(*(one(baton) for _ in range(REQUESTS)))
        await asyncio.to_thread(stack.wait_idle, 1.0)
        after = await baton.complete([5, 6, 7], max_tokens=3, ignore_eos=True)

    assert any(tokens), "no request was cancelled while it was decoded"
    assert 0 in tokens, "no request was cancelled before its first token"
    assert len(after.choices[0].token_ids) == 3
    status = stack.status()
    assert status.active_requests == 0
    assert all(worker.in_flight_requests == 0 for worker in status.workers)


async def test_a_deadline_ends_a_request_and_frees_its_pages(stack: Stack) -> None:
    async with AsyncBatonClient(stack.target) as baton:
        assert await give_up_after(baton, [5, 6, 7], 0.5) > 0
        await asyncio.to_thread(stack.wait_idle, 1.0)
