"""Measurements with real workers and a tiny model: more requests than batch slots, a long prompt beside answers."""

import asyncio
import itertools
import random
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from baton.lab.benchmarks.router.worker import VOCABULARY
from baton.lab.benchmarks.serve.load import Job, ServiceLoad, TargetFailed, random_tokens
from baton.lab.benchmarks.serve.targets import BatonTarget
from baton.lab.harness.processes import HarnessWorker, router_and_workers
from baton.lab.report.statistics import percentile
from baton.launch.tiny_checkpoint import write_tiny_checkpoint

ANSWER_S = 900.0
ANSWER_TOKENS = 8192
WARM_S = 2.0


@dataclass(frozen=True, slots=True)
class WindowFigures:
    """Requests over a decode worker with few batch slots."""

    slots: int
    requests: int
    answered: int
    failed: int
    latency_p50_ms: float
    longest_ms: float


async def over_window(folder: Path, slots: int = 4, requests: int = 32) -> WindowFigures:
    """Send all requests together to one decode worker with `slots` batch slots. Raises: CommandFailed."""
    model = ("--model", folder / "tiny", "--kv-memory", "64MiB")
    workers = (
        HarnessWorker("prefill-0", "baton.prefill_worker", model),
        HarnessWorker("decode-0", "baton.decode_worker", (*model, "--max-sequences", slots)),
    )
    draw = random.Random(0)
    jobs = [Job(random_tokens(draw, 256, VOCABULARY), 64) for _ in range(requests)]
    async with router_and_workers(folder, workers, (), "window-") as cluster:
        target = BatonTarget(cluster.target, timeout_s=ANSWER_S)
        run = await ServiceLoad(target.answer).open_loop(jobs)
        await target.close()
    took_ms = [1e3 * (outcome.ended_s - outcome.sent_s) for outcome in run.outcomes]
    failed = sum(bool(outcome.error) for outcome in run.outcomes)
    return WindowFigures(slots, requests, requests - failed, failed, percentile(took_ms, 50), max(took_ms))


@dataclass(frozen=True, slots=True)
class LongPromptFigures:
    """Answers before and during one long prompt. Gaps: time between messages of an answer.

    `first_token_s`: the prompt's, or the time until its deadline passed.
    """

    colocated: bool
    prompt_tokens: int
    answers: int
    answered: bool
    first_token_s: float
    before_tokens_per_s: float  # of all answers together
    during_tokens_per_s: float
    before_p99_ms: float
    during_p99_ms: float


class _Arrivals:
    """Arrival times of the answers' messages."""

    def __init__(self) -> None:
        self._times: dict[int, list[float]] = {}

    def of(self, number: int) -> list[float]:
        return self._times.setdefault(number, [])

    def between(self, began_s: float, ended_s: float) -> tuple[float, float]:
        """Return messages per second of all answers, and p99 of the gaps in milliseconds."""
        count, gaps_ms = 0, list[float]()
        for times in self._times.values():
            within = [at for at in times if began_s <= at < ended_s]
            count += len(within)
            gaps_ms += [1e3 * (after - before) for before, after in itertools.pairwise(within)]
        return count / (ended_s - began_s), percentile(gaps_ms, 99)


async def beside_long_prompt(
    folder: Path, prompt_tokens: int, colocated: bool, answers: int = 4, seconds: float = 5.0
) -> LongPromptFigures:
    """Start answers, then send a long prompt, and wait for its first token or its deadline. Raises: CommandFailed."""
    context = prompt_tokens + ANSWER_TOKENS
    write_tiny_checkpoint(folder / "long", context_tokens=context, layers=1)
    model = ("--model", folder / "long", "--kv-memory", "512MiB")
    workers = [HarnessWorker("decode-0", "baton.decode_worker", (*model, "--cores", 0))]
    if not colocated:
        workers.append(HarnessWorker("prefill-0", "baton.prefill_worker", (*model, "--cores", 1)))
    draw, arrivals = random.Random(0), _Arrivals()
    async with router_and_workers(folder, workers, (), f"long-{colocated}-") as cluster:
        target = BatonTarget(cluster.target, timeout_s=ANSWER_S)

        async def answer(number: int) -> None:
            while True:
                job = Job(random_tokens(draw, 64, VOCABULARY), ANSWER_TOKENS)
                await target.answer(job, lambda: arrivals.of(number).append(time.monotonic()))

        running = [asyncio.create_task(answer(number)) for number in range(answers)]
        await asyncio.sleep(WARM_S)
        began_s = time.monotonic()
        await asyncio.sleep(seconds)
        asked_s = time.monotonic()
        answered = False
        with suppress(TargetFailed):
            await target.answer(Job(random_tokens(draw, prompt_tokens, VOCABULARY), 1), lambda: None)
            answered = True
        ended_s = time.monotonic()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await target.close()
    before, during = arrivals.between(began_s, asked_s), arrivals.between(asked_s, ended_s)
    return LongPromptFigures(
        colocated, prompt_tokens, answers, answered, ended_s - asked_s, before[0], during[0], before[1], during[1]
    )
