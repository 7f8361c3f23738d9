"""Sends requests as they are due and notes when the pieces of their answers come. Knows no protocol.

Open loop: a request is sent at its time, however many earlier ones are unanswered. Closed loop: so many at a time.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cli.bench.serve_jobs import Job

Clock = Callable[[], float]


class TargetFailed(Exception):
    """The server did not answer, or not to the end. The message is for people."""


class Target(Protocol):
    """A server under test."""

    @property
    def name(self) -> str: ...

    async def prepare(self) -> int | None:
        """Called once, before any request. Returns the size of the vocabulary, where the server reports it.

        Raises: TargetFailed.
        """

    async def answer(self, job: Job, on_piece: Callable[[], None]) -> int:
        """Sends one request; `on_piece` is called when each piece of the answer arrives.

        Greedy, and past any end of sequence. Returns the number of output tokens. Raises: TargetFailed.
        """

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one request. Seconds."""

    prompt_tokens: int
    output_tokens: int  # 0 where it failed
    sent_s: float  # after the start of the run
    late_s: float  # sent so long after its arrival: the lag of this process
    pieces_s: tuple[float, ...]  # when each piece came, after the start of the run
    error: str = ""  # empty: it ended well

    @property
    def ttft_s(self) -> float:
        return self.pieces_s[0] - self.sent_s

    @property
    def latency_s(self) -> float:
        """From the sending to the last piece."""
        return self.pieces_s[-1] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Between pieces, which may have several tokens each."""
        return [later - earlier for earlier, later in zip(self.pieces_s, self.pieces_s[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Run:
    outcomes: tuple[Outcome, ...]  # in the order of the jobs
    duration_s: float  # until the last answer


class Load:
    """One run against one target. `on_done` is called after each answer, for the progress."""

    def __init__(self, target: Target, on_done: Callable[[], object], clock: Clock = time.perf_counter) -> None:
        self._target = target
        self._on_done = on_done
        self._clock = clock

    async def open_loop(self, jobs: Sequence[Job]) -> Run:
        """Every job at its arrival."""
        started = self._clock()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for job in jobs:
                wait_s = started + job.arrival_s - self._clock()
                # also where it is late already: pieces that have arrived meanwhile are read before more is sent
                await asyncio.sleep(max(0.0, wait_s))
                tasks.append(group.create_task(self._one(job, started, due=started + job.arrival_s)))
        return Run(tuple(task.result() for task in tasks), self._clock() - started)

    async def closed_loop(self, jobs: Sequence[Job], concurrency: int) -> Run:
        """The next job whenever one of `concurrency` is answered."""
        started = self._clock()
        places = asyncio.Semaphore(concurrency)

        async def in_turn(job: Job) -> Outcome:
            async with places:
                return await self._one(job, started, due=self._clock())

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(in_turn(job)) for job in jobs]
        return Run(tuple(task.result() for task in tasks), self._clock() - started)

    async def _one(self, job: Job, started: float, due: float) -> Outcome:
        pieces: list[float] = []
        sent = self._clock()
        output_tokens, error = 0, ""
        try:
            output_tokens = await self._target.answer(job, lambda: pieces.append(self._clock() - started))
        except TargetFailed as failure:
            error = str(failure)
        if not pieces and not error:
            error = "the answer had no tokens"
        self._on_done()
        return Outcome(
            len(job.prompt), 0 if error else output_tokens, sent - started, max(0.0, sent - due), tuple(pieces), error
        )
