"""A rolling restart under load: each process drains, exits and is started again; no request fails."""

import asyncio
from collections.abc import Sequence

from baton.client import AsyncBatonClient
from tests.e2e.faulty import targets_of
from tests.e2e.stack import Stack

ROLLED = ("prefill-0", "decode-0", "router")
"""One of each kind, for the sake of time."""

CLIENTS = 4
TOKENS = 40


def prompt_of(client: int) -> list[int]:
    return [50 + client, 60, 70 + client]


async def answer(baton: AsyncBatonClient, client: int) -> list[int]:
    completion = await baton.complete(prompt_of(client), max_tokens=TOKENS, ignore_eos=True)
    return list(completion.choices[0].token_ids)


async def keep_asking(targets: tuple[str, ...], client: int, expected: list[int], over: asyncio.Event) -> int:
    """Send requests, check each answer, and return their number."""
    answers = 0
    async with AsyncBatonClient(targets[client % 2 :] + targets[: client % 2], timeout_s=30) as baton:
        while not over.is_set():
            assert await answer(baton, client) == expected
            answers += 1
    return answers


async def roll(stack: Stack, names: Sequence[str]) -> None:
    for name in names:
        assert await asyncio.to_thread(stack.processes[name].stop) == 0, f"{name} did not drain"
        stack.processes[name].start()
        await asyncio.to_thread(stack.wait_ready)


async def test_rolling_restart_fails_no_request(faulty: Stack) -> None:
    targets, over = targets_of(faulty), asyncio.Event()
    async with AsyncBatonClient(targets, timeout_s=30) as baton:
        expected = [await answer(baton, client) for client in range(CLIENTS)]
    asking = [asyncio.create_task(keep_asking(targets, client, expected[client], over)) for client in range(CLIENTS)]
    try:
        await roll(faulty, ROLLED)
    finally:
        over.set()
        answered = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(count, int) and count > len(ROLLED) for count in answered), answered
