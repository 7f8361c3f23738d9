"""Load generator: sends requests when they are due, notes when pieces of answers arrive, and computes vLLM's metrics.

As in vLLM's `bench serve`, lengths are drawn uniformly around their mean, all prompts share a prefix, and gaps between
arrivals are drawn from a gamma distribution, then scaled so that the last request arrives after requests / rate.

In an open loop, each request is sent at its arrival time, however many earlier ones are unanswered. In a closed loop, a
fixed number is in flight. The jobs may be endless: the run then lasts until it is cancelled.

Metrics count successful requests. TTFT is the time from sending to the first piece, latency (E2EL) to the last. TPOT is
(latency - TTFT) / (output tokens - 1), one value per request with more than one token. ITL has one value per gap
between two pieces, over all requests. A request is good if each of its values is at most its objective; the TPOT of a
request with one token counts as 0. Percentiles are interpolated linearly.
"""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class Job:
    """Request to send."""

    prompt: tuple[int, ...]
    output_tokens: int
    arrival_s: float = 0.0  # seconds after the start of the run; unused in a closed loop


@dataclass(frozen=True, slots=True)
class RandomJobs:
    """Generator of random requests. With `range_ratio` r, lengths are between (1 - r) and (1 + r) times their mean."""

    input_tokens: int
    output_tokens: int
    prefix_tokens: int
    range_ratio: float  # in [0, 1)
    vocab_size: int
    seed: int

    def draw(self, arrivals_s: Sequence[float]) -> list[Job]:
        """Draw one job for each arrival."""
        chance = random.Random(self.seed)
        prefix = random_tokens(chance, self.prefix_tokens, self.vocab_size)
        jobs = []
        for arrival_s in arrivals_s:
            own = random_tokens(chance, draw_length(chance, self.input_tokens, self.range_ratio), self.vocab_size)
            jobs.append(Job(prefix + own, draw_length(chance, self.output_tokens, self.range_ratio), arrival_s))
        return jobs


def draw_length(chance: random.Random, mean: int, range_ratio: float) -> int:
    """Draw a length uniformly around `mean`; at least 1."""
    return chance.randint(max(1, math.floor(mean * (1 - range_ratio))), max(1, math.ceil(mean * (1 + range_ratio))))


FIRST_TOKEN_ID = 3
"""First token id after the special tokens of most vocabularies."""


def random_tokens(chance: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(chance.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(count))


def poisson_arrivals_s(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Draw arrival times; all 0 at an infinite rate. `burstiness`: 1: Poisson; lower: bursts; higher: even gaps."""
    if math.isinf(rate):
        return [0.0] * count
    chance = random.Random(seed)
    arrivals, now = [], 0.0
    for _ in range(count):
        now += chance.gammavariate(burstiness, 1 / (rate * burstiness))
        arrivals.append(now)
    scale = count / rate / now if now > 0 else 1.0
    return [arrival * scale for arrival in arrivals]


Clock = Callable[[], float]


class TargetFailed(Exception):
    """Error: the server did not answer completely."""

    def __init__(self, message: str, code: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code  # name of the gRPC status, empty without one
        self.retry_after_s = retry_after_s


class Target(Protocol):
    """A server under test."""

    @property
    def name(self) -> str: ...

    async def prepare(self) -> int | None:
        """Prepare for requests, once. Returns the vocabulary size if the server reports it.

        Raises: TargetFailed.
        """

    async def answer(self, job: Job, on_piece: Callable[[], None]) -> int:
        """Send a greedy request that ignores end-of-sequence tokens, and return the number of output tokens.

        `on_piece` is called when a piece of the answer arrives. Raises: TargetFailed.
        """

    async def close(self) -> None: ...


Answer = Callable[[Job, Callable[[], None]], Awaitable[int]]
"""Signature of `Target.answer`."""

RESULTS = {"RESOURCE_EXHAUSTED": "refused", "DEADLINE_EXCEEDED": "late"}


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """Outcome of one request. Times are in seconds."""

    prompt_tokens: int
    output_tokens: int  # 0 if it failed
    sent_s: float  # after the start of the run
    late_s: float  # delay of this process: from the job's arrival time to its sending
    pieces_s: tuple[float, ...]  # arrival of each piece, after the start of the run
    error: str = ""  # empty if it succeeded
    ended_s: float = 0.0  # end of the request, after the start of the run
    code: str = ""  # gRPC status, if it failed with one
    retry_after_s: float | None = None

    @property
    def result(self) -> str:
        """Return the result: answered, refused, late (ended by its deadline) or failed."""
        return RESULTS.get(self.code, "failed") if self.error else "answered"

    @property
    def ttft_s(self) -> float:
        return self.pieces_s[0] - self.sent_s

    @property
    def latency_s(self) -> float:
        """Return the time from sending to the last piece."""
        return self.pieces_s[-1] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Return the gaps between pieces; a piece may have several tokens."""
        return [later - earlier for earlier, later in zip(self.pieces_s, self.pieces_s[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class LoadRun:
    outcomes: tuple[LoadOutcome, ...]  # in the order of the jobs
    duration_s: float  # seconds until the last answer


class ServiceLoad:
    """Load on one target. `on_done` is called after each answer."""

    def __init__(
        self, answer: Answer, on_done: Callable[[], object] = lambda: None, clock: Clock = time.monotonic
    ) -> None:
        self._answer = answer
        self._on_done = on_done
        self._clock = clock

    async def open_loop(self, jobs: Iterable[Job]) -> LoadRun:
        """Send every job at its arrival time."""
        started = self._clock()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for job in jobs:
                wait_s = started + job.arrival_s - self._clock()
                # Sleep even if the job is late, so that arrived pieces are read before the next request is sent.
                await asyncio.sleep(max(0.0, wait_s))
                tasks.append(group.create_task(self._one(job, started, due=started + job.arrival_s)))
        return LoadRun(tuple(task.result() for task in tasks), self._clock() - started)

    async def closed_loop(self, jobs: Iterable[Job], concurrency: int, seconds: float = math.inf) -> LoadRun:
        """Keep `concurrency` jobs in flight; send none later than `seconds` after the start."""
        started = self._clock()
        found: dict[int, LoadOutcome] = {}
        numbered = enumerate(jobs)

        async def lane() -> None:
            for number, job in numbered:
                found[number] = await self._one(job, started, due=self._clock())
                if self._clock() - started >= seconds:
                    return

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(lane())
        return LoadRun(tuple(outcome for _, outcome in sorted(found.items())), self._clock() - started)

    async def _one(self, job: Job, started: float, due: float) -> LoadOutcome:
        pieces: list[float] = []
        sent = self._clock()
        output_tokens, error, code, retry_after_s = 0, "", "", None
        try:
            output_tokens = await self._answer(job, lambda: pieces.append(self._clock() - started))
        except TargetFailed as failure:
            error, code, retry_after_s = str(failure), failure.code, failure.retry_after_s
        if not pieces and not error:
            error = "the answer had no tokens"
        self._on_done()
        return LoadOutcome(
            len(job.prompt),
            0 if error else output_tokens,
            sent - started,
            max(0.0, sent - due),
            tuple(pieces),
            error,
            self._clock() - started,
            code,
            retry_after_s,
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, standard deviation and percentiles in milliseconds; all 0 without values."""

    mean: float
    std: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Metrics:
    target: str
    duration: float  # seconds
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float  # requests per second
    request_goodput: float | None  # good requests per second; None without objectives
    output_throughput: float
    total_token_throughput: float
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2el: Spread
    late: Spread  # delay from arrival time to sending; a large delay means that the client was too slow
    errors: tuple[str, ...]  # first few different error messages

    def as_json(self) -> dict[str, Any]:
        """Return the metrics with vLLM's keys: mean_ttft_ms, median_ttft_ms, p99_ttft_ms and so on."""
        result: dict[str, Any] = {}
        for name, value in asdict(self).items():
            if isinstance(value, dict):
                result |= {f"{'median' if part == 'p50' else part}_{name}_ms": ms for part, ms in value.items()}
            else:
                result[name] = value
        return result


ERRORS_SHOWN = 5


def measure(target: str, run: LoadRun, objectives_ms: Mapping[str, float]) -> Metrics:
    """Compute metrics. `objectives_ms`: upper bounds of a good request: ttft, tpot, e2el."""
    good = [outcome for outcome in run.outcomes if not outcome.error]
    input_tokens = sum(outcome.prompt_tokens for outcome in good)
    output_tokens = sum(outcome.output_tokens for outcome in good)
    met = sum(is_good(outcome, objectives_ms) for outcome in good)
    seconds = run.duration_s
    return Metrics(
        target=target,
        duration=seconds,
        completed=len(good),
        failed=len(run.outcomes) - len(good),
        total_input_tokens=input_tokens,
        total_output_tokens=output_tokens,
        request_throughput=len(good) / seconds,
        request_goodput=met / seconds if objectives_ms else None,
        output_throughput=output_tokens / seconds,
        total_token_throughput=(input_tokens + output_tokens) / seconds,
        ttft=spread([outcome.ttft_s for outcome in good]),
        tpot=spread([tpot_s(outcome) for outcome in good if outcome.output_tokens > 1]),
        itl=spread([gap_s for outcome in good for gap_s in outcome.gaps_s]),
        e2el=spread([outcome.latency_s for outcome in good]),
        late=spread([outcome.late_s for outcome in run.outcomes]),
        errors=tuple(dict.fromkeys(outcome.error for outcome in run.outcomes if outcome.error))[:ERRORS_SHOWN],
    )


def tpot_s(outcome: LoadOutcome) -> float:
    """Return the seconds per token after the first; 0 if there is only one."""
    if outcome.output_tokens <= 1:
        return 0.0
    return (outcome.latency_s - outcome.ttft_s) / (outcome.output_tokens - 1)


def is_good(outcome: LoadOutcome, objectives_ms: Mapping[str, float]) -> bool:
    values_s = {"ttft": outcome.ttft_s, "tpot": tpot_s(outcome), "e2el": outcome.latency_s}
    return all(values_s[name] * 1e3 <= most_ms for name, most_ms in objectives_ms.items())


def spread(values_s: Sequence[float]) -> Spread:
    if not values_s:
        return Spread(0.0, 0.0, 0.0, 0.0, 0.0)
    values_ms = np.asarray(values_s) * 1e3
    p50, p90, p99 = (float(value) for value in np.percentile(values_ms, (50, 90, 99)))
    return Spread(float(values_ms.mean()), float(values_ms.std()), p50, p90, p99)
