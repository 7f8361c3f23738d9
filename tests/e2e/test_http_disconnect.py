"""HTTP clients that go, in any phase of their requests, leave no page behind, on either worker."""

import asyncio
import random

import httpx2

from tests.e2e.stack import Stack

REQUESTS = 80
AT_ONCE = 20
LONGEST_S = 0.4


async def give_up_after(client: httpx2.AsyncClient, prompt: list[int], stream: bool, seconds: float) -> int:
    """Returns how many bytes had come."""
    body = {"prompt": prompt, "max_tokens": 1000, "ignore_eos": True, "stream": stream}
    received = 0
    try:
        async with asyncio.timeout(seconds), client.stream("POST", "/v1/completions", json=body) as response:
            async for chunk in response.aiter_raw():
                received += len(chunk)
    except TimeoutError:
        pass
    return received


async def test_all_pages_are_free_within_a_second(stack: Stack) -> None:
    draw = random.Random(7)
    line = asyncio.Semaphore(AT_ONCE)

    async def one(client: httpx2.AsyncClient) -> int:
        prompt = [draw.randrange(3, 500) for _ in range(draw.choice((5, 60, 300, 900)))]
        async with line:
            return await give_up_after(client, prompt, draw.random() < 0.5, draw.uniform(0.0, LONGEST_S))

    async with httpx2.AsyncClient(base_url=stack.url, timeout=30, trust_env=False) as client:
        received = await asyncio.gather(*(one(client) for _ in range(REQUESTS)))
        await asyncio.to_thread(stack.wait_idle, 1.0)

    assert any(received), "no request was given up while it was decoded"
    assert 0 in received, "no request was given up before its first token"
    status = stack.status()
    assert status.active_requests == 0
    assert all(worker.in_flight_requests == 0 for worker in status.workers)
