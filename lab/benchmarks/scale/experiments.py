"""Measurements of one router with a fleet: cost of its workers, of long prompts, and requests while workers die."""

import asyncio
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2

from baton.lab.benchmarks.router.decision import measure as measure_decision
from baton.lab.benchmarks.router.worker import FIRST_LETTER, VOCABULARY
from baton.lab.benchmarks.scale.fleet import MIB, Fleet, FleetShape, fleet
from baton.lab.benchmarks.serve.load import Job, ServiceLoad, TargetFailed, random_tokens
from baton.lab.benchmarks.serve.targets import BatonTarget
from baton.lab.report.statistics import percentile
from baton.launch import CommandFailed
from baton.process.registry.worker_record import WorkerRole

ANSWER_S = 120.0
MESSAGE_TOKENS, DOCUMENTS, LANES = 256, 8, 4
SETTLE_S = 3.0


def letters(tokens: int) -> list[int]:
    """Return the answer of every simulated worker."""
    return [FIRST_LETTER + offset % 26 for offset in range(tokens)]


class CheckedTarget(BatonTarget):
    """Client that compares each answer with the one that all simulated workers give."""

    async def answer(self, job: Job, on_piece: Callable[[], None]) -> int:
        """Send a request, and return the number of its tokens. Raises: TargetFailed."""
        token_ids = await self.tokens(job, on_piece)
        if token_ids != letters(job.output_tokens):
            raise TargetFailed(f"wrong tokens: {token_ids}", "WRONG")
        return len(token_ids)


class ChatTarget:
    """HTTP client whose requests continue a conversation: the text of a job's prompt, in messages of a fixed length."""

    def __init__(self, address: str) -> None:
        self._client = httpx2.AsyncClient(base_url=f"http://{address}", timeout=ANSWER_S)

    async def answer(self, job: Job, on_piece: Callable[[], None]) -> int:
        """Send a request, and return the number of its tokens. Raises: TargetFailed."""
        text = bytes(97 + token_id % 26 for token_id in job.prompt).decode()
        pieces = [text[begin : begin + MESSAGE_TOKENS] for begin in range(0, len(text), MESSAGE_TOKENS)]
        messages = [{"role": "user", "content": piece} for piece in pieces]
        asked = {"messages": messages, "max_tokens": job.output_tokens, "ignore_eos": True, "temperature": 0}
        try:
            response = await self._client.post("/v1/chat/completions", json=asked)
        except httpx2.HTTPError as error:
            raise TargetFailed(f"{type(error).__name__}: {error}") from error
        if response.status_code != httpx2.codes.OK:
            raise TargetFailed(f"{response.status_code}: {response.text[:100]}")
        on_piece()
        return int(response.json()["usage"]["completion_tokens"])

    async def close(self) -> None:
        await self._client.aclose()


@dataclass(frozen=True, slots=True)
class PromptCost:
    """Cost of prompts that extend known ones. CPU time: of the router and its helpers, beyond that without requests."""

    requests: int
    failed: int
    requests_per_s: float
    latency_p50_ms: float
    latency_p99_ms: float
    cpu_ms_per_request: float
    requests_per_s_per_core: float


@dataclass(frozen=True, slots=True)
class FleetCost:
    """Cost of a router by number of workers, without requests and with long prompts."""

    workers: int
    ready_s: float  # from the router's start to links with all workers
    rss_mib: float
    idle_cpu_share: float  # of one core, without requests
    cpu_us_per_worker_s: float  # CPU time per worker and second, without requests
    prompt_tokens: int
    decision_us: float  # lookup, candidates, placement and charge, in this process
    ids: PromptCost  # token ids over gRPC
    chat: PromptCost  # messages over HTTP

    def on_cores(self, cores: int) -> dict[str, float]:
        """Return the requests per second that a router on each of `cores` cores would carry together, by interface.

        Each router is linked with all workers, and workers and clients have other cores.
        """
        left = cores * max(0.0, 1.0 - self.idle_cpu_share)
        return {"ids": left * self.ids.requests_per_s_per_core, "chat": left * self.chat.requests_per_s_per_core}


def extended_prompts(prompt_tokens: int, seed: int = 0) -> Iterator[Job]:
    """Yield endless turns of DOCUMENTS conversations of about `prompt_tokens`; each extends the turn before it."""
    draw = random.Random(seed)
    documents = [random_tokens(draw, prompt_tokens, VOCABULARY) for _ in range(DOCUMENTS)]
    for turn in itertools.count(1):
        for number, document in enumerate(documents):
            yield Job(document, 1)
            documents[number] = document + random_tokens(random.Random(f"{turn}/{number}"), MESSAGE_TOKENS, VOCABULARY)


async def fleet_cost(folder: Path, workers: int, prompt_tokens: int, seconds: float) -> FleetCost:
    """Measure one fleet. Raises: CommandFailed."""
    decision = measure_decision(max(1, workers // 2), prompt_tokens, 300)
    async with fleet(folder, FleetShape(workers)) as found:
        await asyncio.sleep(SETTLE_S)
        before = found.used()
        await asyncio.sleep(seconds)
        after = found.used()
        idle = before.cpu_share(after)
        ids = await _prompt_cost(found, CheckedTarget(found.target), prompt_tokens, seconds, idle)
        chat = await _prompt_cost(found, ChatTarget(found.http_target), prompt_tokens, seconds, idle)
    rss_mib = after.rss_bytes / MIB
    return FleetCost(
        workers, found.ready_s, rss_mib, idle, 1e6 * idle / workers, prompt_tokens, decision.total_us, ids, chat
    )


async def _prompt_cost(
    found: Fleet, target: CheckedTarget | ChatTarget, prompt_tokens: int, seconds: float, idle: float
) -> PromptCost:
    """Measure prompts after the first turn of each conversation. `idle`: CPU share without requests."""
    load, jobs = ServiceLoad(target.answer), extended_prompts(prompt_tokens)
    await load.closed_loop(itertools.islice(jobs, DOCUMENTS), LANES)
    begun = found.used()
    run = await load.closed_loop(jobs, LANES, seconds)
    ended = found.used()
    await target.close()
    good = [outcome.latency_s * 1e3 for outcome in run.outcomes if not outcome.error]
    if not good:
        raise CommandFailed(f"no request succeeded; the first error: {run.outcomes[0].error}")
    spent_s = max(1e-9, ended.cpu_s - begun.cpu_s - idle * (ended.at_s - begun.at_s))
    return PromptCost(
        len(good), len(run.outcomes) - len(good), len(good) / run.duration_s, percentile(good, 50),
        percentile(good, 99), 1e3 * spent_s / len(good), len(good) / spent_s,
    )  # fmt: skip


_DYNAMO_FLEET = FleetShape(2550, prefill_every=51, blocks=256)  # 50 prefill and 2 500 decode workers


@dataclass(frozen=True, slots=True)
class FaultShape:
    """Fault experiment. The numbers of workers, requests and prompt tokens are those of ai-dynamo/dynamo#13088."""

    fleet: FleetShape = _DYNAMO_FLEET
    requests: int = 1536
    prompt_tokens: int = 8192
    answer_tokens: int = 100  # 2 s at the simulated workers' pace, so that faults strike answers, too
    concurrency: int = 64  # what two cores carry: with 256, half of all requests take 17 s even without faults
    pause_s: float = 1.0  # from the end of a fault to the next
    lasts_s: float = 3.0


@dataclass(frozen=True, slots=True)
class FaultFigures:
    prefill_workers: int
    decode_workers: int
    requests: int
    killed_workers: int
    stopped_workers: int
    answered: int  # with all tokens, each once
    failed: int  # ended with an error
    never_ended: int  # no end within the deadline
    latency_p50_ms: float
    latency_p99_ms: float
    longest_ms: float
    errors: tuple[tuple[str, int], ...]


async def survive_faults(folder: Path, shape: FaultShape) -> FaultFigures:
    """Send requests while worker processes are killed and stopped in turn. Raises: CommandFailed."""
    draw, struck = random.Random(0), Counter[str]()
    jobs = [
        Job(random_tokens(draw, shape.prompt_tokens, VOCABULARY), shape.answer_tokens) for _ in range(shape.requests)
    ]
    async with fleet(folder, shape.fleet) as found:
        striking = asyncio.create_task(_strike(found, shape, struck))
        target = CheckedTarget(found.target)
        run = await ServiceLoad(target.answer).closed_loop(jobs, shape.concurrency)
        striking.cancel()
        await asyncio.gather(striking, return_exceptions=True)
        await target.close()
    outcomes = run.outcomes
    took_ms = [1e3 * (outcome.ended_s - outcome.sent_s) for outcome in outcomes]
    errors = Counter(outcome.error[:100] for outcome in outcomes if outcome.error)
    late = sum(outcome.code == "DEADLINE_EXCEEDED" for outcome in outcomes)
    return FaultFigures(
        shape.fleet.count(WorkerRole.PREFILL), shape.fleet.count(WorkerRole.DECODE), len(outcomes), struck["killed"],
        struck["stopped"], sum(not outcome.error for outcome in outcomes), sum(errors.values()) - late, late,
        percentile(took_ms, 50), percentile(took_ms, 99), max(took_ms), tuple(errors.most_common(5)),
    )  # fmt: skip


async def _strike(fleet: Fleet, shape: FaultShape, struck: Counter[str]) -> None:
    """Kill and restart, or stop and continue, one worker process after another until cancelled. Count their workers."""
    for fault in itertools.count():
        await asyncio.sleep(shape.pause_s)
        number = fault * 3 % len(fleet.programs)
        per_process = shape.fleet.per_process
        size = min(per_process, shape.fleet.workers - number * per_process)
        if fault % 2 == 0:
            struck["killed"] += size
            await fleet.kill(number)
            await asyncio.sleep(shape.lasts_s)
            await fleet.start(number)
            continue
        struck["stopped"] += size
        os.kill(fleet.hosts[number].pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(shape.lasts_s)
        finally:
            os.kill(fleet.hosts[number].pid, signal.SIGCONT)
