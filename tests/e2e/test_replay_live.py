"""Streams of every kind are the same as usual if their decode worker is killed, hangs or drains."""

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from baton.client import AsyncBatonClient, Choice, Completion, Delta, RetryPolicy, ServerError
from baton.client.answer import completion_from
from tests.e2e.conftest import run
from tests.e2e.held import answers_held, make_answers_holdable
from tests.e2e.stack import Stack, make_stack
from tests.fixtures.crashing_worker import DEADLY
from tests.fixtures.waiting import eventually

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
TOKENS = 150
LONG_TOKENS = 1_900
HELD_TOKENS = 1_800  # after which an answer pauses until it is handed over; no other answer is that long
DRAIN_S = 0.0  # of decode workers: they hand over all answers at once
LONGEST_GAP_S = 20.0  # on a busy machine; `baton chaos` measures the promised gap
SILENT = ("--session-silence-s", "3")  # short, since a test stops a worker until the router takes it for lost
SEEDED = {"temperature": 1.5, "seed": 3}
LIST = {"type": "array", "items": {"const": "ba"}, "minItems": 120}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "seeded, two choices, cut characters": {**SEEDED, "n": 2, "ignore_eos": True},
    "log-probabilities": {**SEEDED, "logprobs": 2, "ignore_eos": True},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "min_tokens": 100},
    "stop strings": {**SEEDED, "stop": ["never said", "e!", "qzx"], "ignore_eos": True},
    "JSON schema": {"temperature": 1.0, "seed": 8, "json_schema": LIST},
    "best of three": {**SEEDED, "best_of": 3, "ignore_eos": True, "max_tokens": 80},
    "long prompt": {"temperature": 0.0, "ignore_eos": True},
}


@dataclass
class Reader:
    """Reads a stream."""

    kind: str
    events: list[Any] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(len(event.token_ids) for event in self.events if isinstance(event, Delta))

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)), default=0.0)

    async def read(self, baton: AsyncBatonClient) -> Completion:
        length = 700 if self.kind == "long prompt" else 40
        prompt = [3 + (7 * i + len(self.kind)) % 400 for i in range(length)]
        async for event in baton.generate(prompt, **{"max_tokens": TOKENS, **KINDS[self.kind]}):
            self.events.append(event)
            self.times_s.append(time.monotonic())
        return completion_from(self.events)


@pytest.fixture(scope="module")
def twofold(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """2P+2D; a certain prompt kills workers, and they are not restarted."""
    stack = make_stack(tmp_path_factory.mktemp("twofold"), tiny_llama, prefill=2, decode=2, router_flags=SILENT)
    for name in WORKERS:
        role, command = name.partition("-")[0], stack.processes[name].command
        place = command.index(f"baton.{role}_worker")
        command[place : place + 1] = ["tests.fixtures.crashing_worker", role]
        if role == "decode":
            stack.processes[name].command += ["--drain-s", str(DRAIN_S)]
    make_answers_holdable(stack)
    yield from run(stack)


@pytest.fixture(scope="module")
def undisturbed(twofold: Stack) -> dict[str, Completion]:
    return asyncio.run(all_streams(twofold, lambda readers: asyncio.sleep(0)))


async def all_streams(stack: Stack, disturb: Callable[[Sequence[Reader]], Awaitable[None]]) -> dict[str, Completion]:
    readers = [Reader(kind) for kind in KINDS]
    async with AsyncBatonClient(stack.target, timeout_s=60, retry=RetryPolicy(attempts=1)) as baton:
        answers = [asyncio.create_task(reader.read(baton)) for reader in readers]
        try:
            await disturb(readers)
            completions = await asyncio.gather(*answers)
        finally:
            for answer in answers:
                answer.cancel()
    assert max(reader.longest_gap_s for reader in readers) < LONGEST_GAP_S
    return dict(zip(KINDS, completions, strict=True))


async def until_tokens(readers: Sequence[Reader], tokens: int) -> None:
    """Wait until that many tokens have arrived in all."""
    await eventually(lambda: sum(reader.tokens for reader in readers) >= tokens)


def assert_equal(answers: dict[str, Completion], wanted: dict[str, Completion]) -> None:
    for kind, answer in answers.items():
        for choice, want in zip(answer.choices, wanted[kind].choices, strict=True):
            assert plain(choice) == plain(want), kind
            if want.logprobs is not None and choice.logprobs is not None:
                told = [each.logprob for each in choice.logprobs]
                assert told == pytest.approx([each.logprob for each in want.logprobs], abs=1e-4)
        assert answer.usage.completion_tokens == wanted[kind].usage.completion_tokens
        assert answer.usage.prompt_tokens == wanted[kind].usage.prompt_tokens


def plain(choice: Choice) -> tuple[object, ...]:
    return choice.token_ids, choice.text, choice.finish_reason, choice.matched_stop


async def test_streams_survive_a_hanging_decode_worker_and_a_killed_one(
    twofold: Stack, undisturbed: dict[str, Completion]
) -> None:
    hung, killed = twofold.processes["decode-0"], twofold.processes["decode-1"]

    async def disturb(readers: Sequence[Reader]) -> None:
        await until_tokens(readers, random.randrange(50, 400))
        hung.signal(signal.SIGSTOP)
        await until_tokens(readers, 700)
        hung.signal(signal.SIGCONT)
        killed.kill()

    try:
        assert_equal(await all_streams(twofold, disturb), undisturbed)
    finally:
        hung.signal(signal.SIGCONT)
    killed.start()
    await asyncio.to_thread(twofold.wait_ready)
    await asyncio.to_thread(twofold.wait_idle)


async def test_requests_left_by_a_drain_resume_elsewhere(twofold: Stack, undisturbed: dict[str, Completion]) -> None:
    """A decode worker is stopped while it has answers."""

    def handed_over() -> int:
        return twofold.processes["router"].text().count("failed: DRAINING at")

    before = handed_over()
    async with AsyncBatonClient(twofold.target, timeout_s=60, retry=RetryPolicy(attempts=1)) as baton:
        with answers_held(twofold, HELD_TOKENS) as held:
            long_answer = asyncio.create_task(baton.complete([5, 6, 7], max_tokens=LONG_TOKENS, ignore_eos=True))
            drained = twofold.processes[await decode_worker_at_work(twofold)]

            async def disturb(readers: Sequence[Reader]) -> None:
                await until_tokens(readers, 60)
                drained.terminate()
                await asyncio.to_thread(twofold.wait_for, lambda: handed_over() > before, 30.0, "hand-over")
                held.let_go()

            assert_equal(await all_streams(twofold, disturb), undisturbed)
        assert (await long_answer).usage.completion_tokens == LONG_TOKENS
    assert await asyncio.to_thread(drained.ended) == 0
    drained.start()
    await asyncio.to_thread(twofold.wait_ready)


async def decode_worker_at_work(stack: Stack) -> str:
    """Wait for a decode worker with a request, the only one, and return its name."""
    async with asyncio.timeout(30):
        while True:
            for worker in (await asyncio.to_thread(stack.status)).workers:
                if worker.role == "decode" and worker.in_flight_requests:
                    return worker.worker_id


async def test_deadly_request_is_rejected_and_its_neighbours_served(
    twofold: Stack, undisturbed: dict[str, Completion]
) -> None:
    """It kills both prefill workers and a decode worker that computes the prompt itself; then it is given up."""

    async def poison(readers: Sequence[Reader]) -> None:
        await until_tokens(readers, 100)
        async with AsyncBatonClient(twofold.target, timeout_s=30, retry=RetryPolicy(attempts=1)) as baton:
            for _ in range(2):  # the second one is refused at once
                with pytest.raises(ServerError) as refused:
                    await baton.complete([5, *DEADLY, 6], max_tokens=4)
                assert refused.value.reason == "POISON"

    assert_equal(await all_streams(twofold, poison), undisturbed)
    dead = [name for name in WORKERS if not twofold.processes[name].runs]
    assert len(dead) == 3 and {"prefill-0", "prefill-1"} < set(dead)
    for name in dead:
        twofold.processes[name].popen = None  # so that their exit codes are not checked
    await asyncio.to_thread(twofold.wait_idle)
