"""The requests of `baton bench isolation`, and when their tokens came back: long answers, beside prompts."""

import asyncio
import gc
import itertools
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from baton.benchmarks.serve.load import Job, Target, TargetFailed, random_tokens
from baton.launch.errors import CommandFailed

WARM_PIECES = 8  # of each long answer, before anything counts
POLL_S = 0.02
START_TIMEOUT_S = 180.0  # until every long answer has those
SETTLE_S = 0.3  # after a phase: cancelled requests give back their resources


class Phase(StrEnum):
    """The load beside the long answers."""

    QUIET = "quiet"
    PACED = "paced"  # prompts at a fixed rate, even if they queue up
    SATURATED = "saturated"  # a few prompts always in flight
    FLOOR = "floor"  # no prompt: another process does a prefill worker's matrix products, and nothing else


@dataclass(frozen=True, slots=True)
class Load:
    """`seconds` of measuring, once every long answer is under way."""

    seconds: float
    answers: int
    answer_prompt_tokens: int
    answer_tokens: int  # most of each; it has to last
    prompt_tokens: int
    prompts_per_s: float  # of PACED
    prompts_in_flight: int  # of SATURATED


@dataclass(slots=True)
class StreamLog:
    """One request. All times in monotonic seconds."""

    asked: float
    arrivals: list[float] = field(default_factory=list)  # of messages with tokens: one each, under way
    is_complete: bool = False

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.asked


@dataclass(slots=True)
class PhaseLog:
    """All requests of one phase; those that ended within [began, ended) count."""

    began: float = 0.0
    ended: float = 0.0
    answers: list[StreamLog] = field(default_factory=list)
    prompts: list[StreamLog] = field(default_factory=list)


async def run_phase(
    target: Target, load: Load, phase: Phase, seed: int, vocab_size: int, on_window: Callable[[], None]
) -> PhaseLog:
    """`on_window` is called when the counted time begins, and when it has ended.

    Prompts begin before the long answers do, whose time to first token is thus what a user meets under that load.
    Raises: CommandFailed where an answer fails, is not under way in time, or does not last.
    """
    client = _Client(target, load, random.Random(f"{seed}/{phase}"), vocab_size)
    tasks = [asyncio.create_task(work) for work in client.work(phase)]
    log = client.log
    gc.collect()
    gc.disable()  # the client is the measuring device
    try:
        await _until_warm(log, load, tasks)
        on_window()
        log.began = time.monotonic()
        await asyncio.wait(tasks, timeout=load.seconds, return_when=asyncio.FIRST_EXCEPTION)
        log.ended = time.monotonic()
        on_window()
        _raise_failure(tasks)
    finally:
        gc.enable()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if log.ended - log.began < load.seconds or any(answer.is_complete for answer in log.answers):
        raise CommandFailed("the long answers ended before the time was over: fewer --seconds, more --answer-tokens")
    await asyncio.sleep(SETTLE_S)
    return log


class _Client:
    def __init__(self, target: Target, load: Load, draw: random.Random, vocab_size: int) -> None:
        self._target = target
        self._load = load
        self._draw = draw
        self._vocab_size = vocab_size
        self.log = PhaseLog()

    def work(self, phase: Phase) -> list[Coroutine[Any, Any, None]]:
        """Tasks to be: those that prompt first. Only cancelling ends them."""
        load, prompting = self._load, list[Coroutine[Any, Any, None]]()
        if phase is Phase.PACED:
            prompting = [self._pace()]
        elif phase is Phase.SATURATED:
            prompting = [self._one_after_another() for _ in range(load.prompts_in_flight)]
        answers = [
            self._ask(load.answer_prompt_tokens, load.answer_tokens, self.log.answers) for _ in range(load.answers)
        ]
        return prompting + answers

    async def _pace(self) -> None:
        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in itertools.count():
                await asyncio.sleep(max(0.0, started + number / self._load.prompts_per_s - time.monotonic()))
                group.create_task(self._prompt())

    async def _one_after_another(self) -> None:
        while True:
            await self._prompt()

    async def _answer(self) -> None:
        await self._ask(self._load.answer_prompt_tokens, self._load.answer_tokens, self.log.answers)

    async def _prompt(self) -> None:
        await self._ask(self._load.prompt_tokens, 1, self.log.prompts)

    async def _ask(self, prompt_tokens: int, answer_tokens: int, logs: list[StreamLog]) -> None:
        """The prompt is random: no cache knows any of it."""
        job = Job(random_tokens(self._draw, prompt_tokens, self._vocab_size), answer_tokens)
        log = StreamLog(time.monotonic())
        logs.append(log)
        await self._target.answer(job, lambda: log.arrivals.append(time.monotonic()))
        log.is_complete = True


async def _until_warm(log: PhaseLog, load: Load, tasks: Sequence["asyncio.Task[None]"]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while sum(len(answer.arrivals) >= WARM_PIECES for answer in log.answers) < load.answers:
        await asyncio.wait(tasks, timeout=POLL_S, return_when=asyncio.FIRST_EXCEPTION)
        _raise_failure(tasks)
        if time.monotonic() > deadline:
            raise CommandFailed(f"the long answers were not under way within {START_TIMEOUT_S:g} s")


def _raise_failure(tasks: Sequence["asyncio.Task[None]"]) -> None:
    for task in tasks:
        error = task.exception() if task.done() else None
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, TargetFailed):
            raise CommandFailed(f"a request failed: {error}") from error
        if error is not None:
            raise error
