"""After `kill -9` of a router, clients resume their streams at another router, or at the restarted one."""

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from baton.client import AsyncBatonClient, Completion, Delta, RetryPolicy, Unavailable
from baton.client.answer import completion_from
from tests.e2e.faulty import second_of
from tests.e2e.held import Held, answers_held
from tests.e2e.stack import IDLE_S, Stack
from tests.fixtures.waiting import eventually

STREAMS = 10
TOKENS = 150
LONG_TOKENS = 1_900
HELD_TOKENS, LONG_HELD_TOKENS = 140, 1_800  # after which an answer pauses until the router is killed
WORKERS_GRACE_S = 10.0
SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 60, "maxItems": 60}
KINDS: Sequence[dict[str, Any]] = (
    {},
    {"temperature": 1.0, "seed": 3, "n": 2},
    {"temperature": 1.0, "seed": 4, "stop": ["\u0000\u0000"], "frequency_penalty": 0.5},
    {"temperature": 0.8, "seed": 5, "logprobs": 2},
    {"temperature": 1.0, "seed": 6, "json_schema": SCHEMA, "ignore_eos": False},
)
WITH_SCHEMA = len(KINDS) - 1


@dataclass
class Streams:
    """Concurrent streams: their answers, and the longest gap between events of each."""

    targets: Sequence[str]
    seen_tokens: int = 0
    begun: set[int] = field(default_factory=set)
    longest_gaps_s: list[float] = field(default_factory=list)

    async def all(self, count: int) -> list[Completion]:
        return await asyncio.gather(*(self.one(number) for number in range(count)))

    async def one(self, number: int) -> Completion:
        options: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, **KINDS[number % len(KINDS)]}
        prompt = [7 + number, 8, 9] * 15
        events, times = [], [time.monotonic()]
        async with AsyncBatonClient(self.targets, timeout_s=40) as baton:
            async for event in baton.generate(prompt, **options):
                events.append(event)
                times.append(time.monotonic())
                if isinstance(event, Delta):
                    self.seen_tokens += len(event.token_ids)
                    self.begun.add(number)
        self.longest_gaps_s.append(max(after - before for before, after in itertools.pairwise(times)))
        return completion_from(events)

    async def under_way(self, tokens: int, held: Held) -> None:
        """Wait until all streams have begun: a request without a first event is sent again, and would find no router.

        A total number of tokens would not do, since one stream may be far ahead of the others.
        """
        await eventually(lambda: len(self.begun) >= STREAMS and (self.seen_tokens >= tokens or held.workers))


def content(answers: Sequence[Completion]) -> list[Any]:
    """Return an answer without its log-probabilities."""
    bare = [[replace(choice, logprobs=None) for choice in answer.choices] for answer in answers]
    return [(choices, answer.usage.completion_tokens) for choices, answer in zip(bare, answers, strict=True)]


def logprobs(answers: Sequence[Completion]) -> list[float]:
    tokens = [token for answer in answers for choice in answer.choices for token in choice.logprobs or ()]
    return [number for token in tokens for number in (token.logprob, *(each.logprob for each in token.top))]


@pytest.fixture
def second(faulty: Stack) -> Iterator[Stack]:
    """Stack that addresses the second router; the first one is running again after the test."""
    yield second_of(faulty)
    faulty.start([name for name, process in faulty.processes.items() if not process.runs])
    faulty.wait_ready()


@pytest.fixture(scope="module")
def whole() -> list[Completion]:
    """Answers of the streams without a fault; filled by the first test that needs them."""
    return []


async def broken_by(faulty: Stack, targets: Sequence[str], whole: list[Completion], restarts: bool) -> Streams:
    """Kill the first router in the middle of all streams, and compare the answers with those without a fault."""
    if not whole:
        whole += await Streams([faulty.target]).all(STREAMS)
    await Streams([faulty.target]).one(
        WITH_SCHEMA
    )  # a router that has just started takes long to check the first schema
    streams = Streams(targets)
    with answers_held(faulty, HELD_TOKENS) as held:
        calls = asyncio.create_task(streams.all(STREAMS))
        await streams.under_way(STREAMS * TOKENS // 4, held)
        faulty.processes["router"].kill()
    if restarts:
        faulty.processes["router"].start()
    answers = await calls
    assert content(answers) == content(whole)
    # If no worker kept an answer, its KV is recomputed in other steps, and float32 may round differently.
    assert logprobs(answers) == pytest.approx(logprobs(whole), abs=1e-4)
    return streams


async def test_streams_of_a_killed_router_go_on_at_another_one(
    faulty: Stack, second: Stack, whole: list[Completion]
) -> None:
    streams = await broken_by(faulty, [faulty.target, second.target], whole, restarts=False)
    assert max(streams.longest_gaps_s) < WORKERS_GRACE_S
    await asyncio.to_thread(second.wait_idle)


async def test_streams_of_a_router_that_restarts_go_on_there(
    faulty: Stack, second: Stack, whole: list[Completion]
) -> None:
    await broken_by(faulty, [faulty.target], whole, restarts=True)
    await asyncio.to_thread(second.wait_idle)


async def test_unresumed_streams_leave_no_page(faulty: Stack, second: Stack) -> None:
    async with AsyncBatonClient(faulty.target, retry=RetryPolicy(attempts=1)) as baton:
        stream = baton.generate([5, 6, 7] * 20, n=4, temperature=1.0, max_tokens=LONG_TOKENS, ignore_eos=True)
        with answers_held(faulty, LONG_HELD_TOKENS):
            await anext(stream)
            await asyncio.to_thread(second.wait_for, lambda: held_blocks(second) > 0, 30.0, "pages held")
            faulty.processes["router"].kill()
        with pytest.raises(Unavailable):
            while True:
                await anext(stream)
    await asyncio.to_thread(second.wait_idle, WORKERS_GRACE_S + IDLE_S)


def held_blocks(stack: Stack) -> int:
    return sum(worker.load.pages.held for worker in stack.status().workers if worker.load is not None)
