"""Load of `baton bench isolation`: long answers, prompts during them, and the arrival times of tokens."""

import asyncio
import gc
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from baton.lab.benchmarks.serve import load as generator
from baton.lab.benchmarks.serve.load import Job, Target, TargetFailed, random_tokens
from baton.launch import CommandFailed

WARM_PIECES = 8  # messages of each long answer before the measurement begins
POLL_S = 0.02
START_TIMEOUT_S = 180.0  # longest wait until every long answer has WARM_PIECES messages
SETTLE_S = 0.3  # wait after a phase, until cancelled requests have released their resources


class LoadPhase(StrEnum):
    """Load in addition to the long answers."""

    QUIET = "quiet"
    PACED = "paced"  # prompts at a fixed rate, open loop
    SATURATED = "saturated"  # a fixed number of prompts in flight
    FLOOR = "floor"  # no prompts; another process computes a prefill worker's matrix products


@dataclass(frozen=True, slots=True)
class PhaseLoad:
    """Load of a phase. `seconds`: measured time, which begins once every long answer has begun."""

    seconds: float
    answers: int
    answer_prompt_tokens: int
    answer_tokens: int  # maximum length of a long answer, which must outlast the phase
    prompt_tokens: int
    prompts_per_s: float  # rate in phase PACED
    prompts_in_flight: int  # concurrency in phase SATURATED


@dataclass(slots=True)
class StreamLog:
    """Record of one request. All times in monotonic seconds."""

    asked: float
    arrivals: list[float] = field(default_factory=list)  # times of messages with tokens
    is_complete: bool = False

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.asked


@dataclass(slots=True)
class PhaseLog:
    """Records of one phase; requests that ended within [began, ended) count."""

    began: float = 0.0
    ended: float = 0.0
    answers: list[StreamLog] = field(default_factory=list)
    prompts: list[StreamLog] = field(default_factory=list)


async def run_phase(
    target: Target, load: PhaseLoad, phase: LoadPhase, seed: int, vocab_size: int, on_window: Callable[[], None]
) -> PhaseLog:
    """Run a phase. `on_window` is called at the start and at the end of the measured interval.

    Prompts begin before the long answers, whose TTFT is thus measured under load. Raises: CommandFailed if an answer
    fails, does not begin in time, or finishes early.
    """
    log = PhaseLog()
    chance = random.Random(f"{seed}/{phase}")
    tasks = [asyncio.create_task(_prompts(target, load, phase, log, chance, vocab_size))]
    tasks += [asyncio.create_task(_answers(target, load, log, chance, vocab_size))]
    gc.collect()
    gc.disable()  # garbage collections would delay the client, which measures times
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
        raise CommandFailed("a long answer finished before the phase: decrease --seconds or increase --answer-tokens")
    await asyncio.sleep(SETTLE_S)
    return log


def _logged(target: Target, logs: list[StreamLog]) -> generator.Answer:
    """Return an answer function that logs each request; a failed request ends the phase."""

    async def answer(job: Job, on_piece: Callable[[], None]) -> int:
        log = StreamLog(time.monotonic())
        logs.append(log)
        try:
            tokens = await target.answer(job, lambda: log.arrivals.append(time.monotonic()))
        except TargetFailed as failure:
            raise CommandFailed(f"a request failed: {failure}") from failure
        log.is_complete = True
        return tokens

    return answer


async def _prompts(
    target: Target, load: PhaseLoad, phase: LoadPhase, log: PhaseLog, chance: random.Random, vocab_size: int
) -> None:
    """Send random prompts, which are in no cache, until cancelled."""
    sending = generator.ServiceLoad(_logged(target, log.prompts))

    def jobs(period_s: float) -> Iterator[Job]:
        for number in itertools.count():
            yield Job(random_tokens(chance, load.prompt_tokens, vocab_size), 1, number * period_s)

    if phase is LoadPhase.PACED:
        await sending.open_loop(jobs(1 / load.prompts_per_s))
    elif phase is LoadPhase.SATURATED:
        await sending.closed_loop(jobs(0.0), load.prompts_in_flight)


async def _answers(target: Target, load: PhaseLoad, log: PhaseLog, chance: random.Random, vocab_size: int) -> None:
    prompts = [random_tokens(chance, load.answer_prompt_tokens, vocab_size) for _ in range(load.answers)]
    await generator.ServiceLoad(_logged(target, log.answers)).open_loop(
        [Job(each, load.answer_tokens) for each in prompts]
    )


async def _until_warm(log: PhaseLog, load: PhaseLoad, tasks: Sequence["asyncio.Task[None]"]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while sum(len(answer.arrivals) >= WARM_PIECES for answer in log.answers) < load.answers:
        await asyncio.wait(tasks, timeout=POLL_S, return_when=asyncio.FIRST_EXCEPTION)
        _raise_failure(tasks)
        if time.monotonic() > deadline:
            raise CommandFailed(f"the long answers have not started within {START_TIMEOUT_S:g} s")


def _raise_failure(tasks: Sequence["asyncio.Task[None]"]) -> None:
    for task in tasks:
        error = task.exception() if task.done() else None
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is not None:
            raise error
