"""After `kill -9` of the only decode worker, or of prefill workers, clients see a delay and nothing else."""

import asyncio
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from baton.client import AsyncBatonClient, Delta, RetryPolicy
from tests.e2e.conftest import run
from tests.e2e.held import answers_held, make_answers_holdable
from tests.e2e.stack import Stack, make_stack

SHARED_MEMORY = Path("/dev/shm")
HELD_TOKENS = 250  # after which an answer pauses until a worker is killed


@pytest.fixture(scope="module")
def mortal_stack(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Stack of this module whose processes are killed; checks that they leave nothing in /dev/shm."""
    before = set(SHARED_MEMORY.iterdir())
    stack = make_stack(tmp_path_factory.mktemp("mortal"), tiny_llama, prefill=2)
    make_answers_holdable(stack)
    yield from run(stack)
    # Other programs may have files there for a moment.
    stack.wait_for(lambda: set(SHARED_MEMORY.iterdir()) <= before, 30.0, "clean /dev/shm")


@pytest.fixture
def mortal(mortal_stack: Stack) -> Stack:
    """The stack with all processes running, also those that an earlier test killed."""
    mortal_stack.start([name for name, process in mortal_stack.processes.items() if not process.runs])
    mortal_stack.wait_ready()
    return mortal_stack


async def stream_over_a_kill(stack: Stack, victim: str, prompt: list[int], tokens_first: int) -> list[int]:
    """Stream an answer, kill and restart `victim` in its middle, and return all tokens."""
    tokens: list[int] = []
    killed = False
    async with AsyncBatonClient(stack.target, retry=RetryPolicy(attempts=1)) as baton:
        with answers_held(stack, HELD_TOKENS) as held:
            async for event in baton.generate(prompt, max_tokens=300, temperature=0.0, ignore_eos=True):
                tokens += event.token_ids if isinstance(event, Delta) else ()
                if len(tokens) >= tokens_first and not killed:
                    killed = True
                    stack.processes[victim].kill()
                    held.let_go()
                    stack.processes[victim].start()
    return tokens


async def serves(stack: Stack) -> bool:
    async with AsyncBatonClient(stack.target, timeout_s=30) as baton:
        answer = await baton.complete([5, 6, 7], max_tokens=4, ignore_eos=True)
    return len(answer.choices[0].token_ids) == 4


async def test_stream_of_the_only_decode_worker_resumes_after_its_restart(mortal: Stack) -> None:
    disturbed = await stream_over_a_kill(mortal, "decode-0", [5, 6, 7], tokens_first=10)
    async with AsyncBatonClient(mortal.target, timeout_s=30) as baton:
        again = await baton.complete([5, 6, 7], max_tokens=300, temperature=0.0, ignore_eos=True)
    assert disturbed == list(again.choices[0].token_ids)

    await asyncio.to_thread(mortal.wait_ready)
    assert await serves(mortal)
    await asyncio.to_thread(mortal.wait_idle)


async def test_killed_prefill_worker_does_not_touch_answers_that_have_left_it(mortal: Stack) -> None:
    tokens, killed = 0, False
    async with AsyncBatonClient(mortal.target) as baton:
        with answers_held(mortal, HELD_TOKENS) as held:
            async for event in baton.generate([8, 9, 10], max_tokens=300, ignore_eos=True):
                tokens += len(event.token_ids) if isinstance(event, Delta) else 0
                if tokens >= 20 and not killed:
                    killed = True
                    mortal.processes["prefill-0"].kill()
                    mortal.processes["prefill-1"].kill()
                    held.let_go()
    assert tokens == 300
    assert await serves(mortal), "the decode worker does not compute prompts meanwhile"

    mortal.start(["prefill-0", "prefill-1"])
    await asyncio.to_thread(mortal.wait_ready)
    assert await serves(mortal)
    await asyncio.to_thread(mortal.wait_idle)


def has_requests(stack: Stack, name: str) -> bool:
    return any(each.in_flight_requests for each in stack.status().workers if each.worker_id == name)


async def collect(baton: AsyncBatonClient, prompt: list[int], cache_salt: str = "") -> list[int]:
    answer = await baton.complete(prompt, max_tokens=4, ignore_eos=True, cache_salt=cache_salt)
    return list(answer.choices[0].token_ids)


async def test_prompts_of_a_killed_prefill_worker_are_computed_by_another(mortal: Stack) -> None:
    """Some prompts are queued, some are being computed and some being pulled when the worker dies."""
    prompts = [[3 + (i * 7 + j) % 500 for j in range(1500)] for i in range(12)]
    async with AsyncBatonClient(mortal.target, timeout_s=30, retry=RetryPolicy(attempts=1)) as baton:
        undisturbed = [await collect(baton, prompt) for prompt in prompts]
        victim = mortal.processes["prefill-0"]
        victim.signal(signal.SIGSTOP)  # until it has received its share of the prompts
        calls = [asyncio.create_task(collect(baton, prompt, cache_salt="again")) for prompt in prompts]
        given = partial(has_requests, mortal, "prefill-0")
        await asyncio.to_thread(mortal.wait_for, given, 20.0, "prompts at prefill-0")
        victim.signal(signal.SIGCONT)
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        victim.kill()
        answers = await asyncio.gather(*calls)

    assert answers == undisturbed
    await asyncio.to_thread(mortal.wait_idle)
