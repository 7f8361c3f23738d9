"""HTTP clients that disconnect in any phase leave no KV page held, on either worker."""

import asyncio
import random

import httpx2

from tests.e2e.stack import Stack

REQUESTS = 80
AT_ONCE = 20
LONGEST_S = 0.4
MOST_BYTES = 20_000


async def give_up(
    client: httpx2.AsyncClient, prompt: list[int], stream: bool, after_s: float, after_bytes: int = 1 << 30
) -> int:
    """Disconnect after some time or some bytes; return how many bytes had arrived."""
    body = {"prompt": prompt, "max_tokens": 1000, "ignore_eos": True, "stream": stream}
    received = 0
    try:
        async with asyncio.timeout(after_s), client.stream("POST", "/v1/completions", json=body) as response:
            async for chunk in response.aiter_raw():
                received += len(chunk)
                if received >= after_bytes:
                    break
    except TimeoutError:
        pass
    return received


async def test_all_pages_are_free_again(stack: Stack) -> None:
    draw = random.Random(7)
    line = asyncio.Semaphore(AT_ONCE)

    async def one(client: httpx2.AsyncClient, number: int) -> int:
        """Disconnect one client; every third one only after its first bytes, so that its request is being decoded."""
        prompt = [draw.randrange(3, 500) for _ in range(draw.choice((5, 60, 300, 900)))]
        async with line:
            if number % 3 == 0:
                return await give_up(client, prompt, True, 30.0, draw.randint(1, MOST_BYTES))
            return await give_up(client, prompt, draw.random() < 0.5, draw.uniform(0.0, LONGEST_S))

    async with httpx2.AsyncClient(base_url=stack.url, timeout=30, trust_env=False) as client:
        received = await asyncio.gather(*(one(client, number) for number in range(REQUESTS)))
        await asyncio.to_thread(stack.wait_idle)

    assert all(received[::3])
    assert 0 in received, "no request was given up before its first token"
    await asyncio.to_thread(stack.wait_without_requests)
