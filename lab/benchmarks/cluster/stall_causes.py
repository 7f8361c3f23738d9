"""Do the causes of stalls add up to them, which are they, and what does it cost to know? A mixed load on a real stack.

    .venv/bin/python -m baton.lab.benchmarks.cluster.stall_causes [--model FOLDER] [--requests 500] [--at-once 12]
                                              [--pictures FOLDER] [--json FILE]

A router, 1P+1D, each a process of its own that meters itself (wrapped_process.py). Prompts of four lengths, answers of
three; short prompts are computed on the decode worker, beside its answers. From the trace file: of each stall, how far
usual time and causes are off its gap; the share of each cause in all stalled time; how far the stages are off the TTFT.
The costs are attributed CPU time, not a difference of two runs.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baton.lab.benchmarks.processes import HOST, Cluster, Program, our_program, ports_of, running, split_cores
from baton.lab.benchmarks.report.picture import Axis, BarChart, Bars, draw_bars
from baton.lab.benchmarks.report.result import DEMO, read_arguments, write_pictures, write_result
from baton.lab.benchmarks.serve.load import Job, Load, RandomJobs
from baton.lab.benchmarks.serve.targets import BatonTarget
from baton.launch import CommandFailed
from baton.launch.devices import write_cores
from baton.process.registry.redis_server import free_port, start_redis_server

PROMPT_TOKENS = (16, 48, 200, 600)
ANSWER_TOKENS = (16, 64, 160)
TTFT_PARTS = ("router_queue", "route", "prefill_fetch", "prefill_queue", "prefill", "return")
WORKER_PARTS = ("step records", "hand-overs", "gaps", "request times", "worker spans")
ROUTER_PARTS = ("stalls", "timelines", "loop lag")
CLOSE = 0.05
TTFT_CLOSE_MS, TTFT_CLOSE = 2.0, 0.03
WORKERS = ("prefill-0", "decode-0")


@dataclass(frozen=True, slots=True)
class Found:
    requests: int
    stalls: int
    add_up: float  # share of the stalls whose parts are within CLOSE of the gap
    blamed: int  # stalls whose first cause names a request
    first_causes: dict[str, int]  # stalls by their first cause
    cause_ms: dict[str, float]  # of all stalls
    ttft_adds_up: float  # share of the requests


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time, and for what."""

    steps: int
    steps_ms: float
    worker_ms: dict[str, float]
    router_us_per_request: dict[str, float]

    @property
    def share_of_steps(self) -> float:
        return sum(self.worker_ms.values()) / self.steps_ms


def programs(folder: Path, model: Path, redis_url: str, cluster: Cluster) -> list[Program]:
    """Prefill and decode on cores of their own, where there are two."""
    registry = ("--redis-url", redis_url, "--log-level", "warning", "--trace-file", folder / "trace.jsonl")
    first, second = split_cores()

    def program(name: str, role: str, *flags: object) -> Program:
        metered = ("baton.lab.benchmarks.wrapped_process", "meter", role, folder / f"{name}.json")
        return our_program(name, folder, *metered, *flags, *registry)

    workers = [
        program(
            name,
            name.partition("-")[0],
            *("--worker-id", name, "--port", free_port(), "--model", model, "--kv-memory", "128MiB"),
            *("--cores", write_cores(cores)),
        )
        for name, cores in zip(WORKERS, (first, second), strict=True)
    ]
    return [*workers, program("router", "router", *ports_of(cluster))]


def mixed(requests: int) -> list[Job]:
    """In turn of every kind."""
    kinds = [(prompt, answer) for prompt in PROMPT_TOKENS for answer in ANSWER_TOKENS]
    jobs = []
    for number in range(requests):
        prompt, answer = kinds[number * 7 % len(kinds)]
        jobs += RandomJobs(prompt, answer, 0, 0.3, vocab_size=250, seed=number).draw([0.0])
    return jobs


async def measure(model: Path, requests: int, at_once: int, folder: Path) -> tuple[Found, Cost]:
    """Raises: CommandFailed where a request fails."""
    redis = start_redis_server()
    try:
        cluster = Cluster(f"{HOST}:{free_port()}", f"{HOST}:{free_port()}", len(WORKERS))
        async with running(programs(folder, model, redis.url, cluster), cluster.is_ready):
            target = BatonTarget(cluster.target)
            run = await Load(target.answer).closed_loop(mixed(requests), at_once)
            await target.close()
        if errors := [outcome.error for outcome in run.outcomes if outcome.error]:
            raise CommandFailed(errors[0])
        spans = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
        return found_in(spans), cost_of(folder, requests)
    finally:
        redis.stop()


def found_in(spans: Sequence[dict[str, Any]]) -> Found:
    roots = [
        span["attributes"] for span in spans if span["parent_span_id"] is None and "baton.ttft_ms" in span["attributes"]
    ]
    stalls = [
        event["attributes"]
        for span in spans
        if span["name"] == "decode"
        for event in span["events"]
        if event["name"] == "stall"
    ]
    first, spent_ms, blamed = Counter[str](), Counter[str](), 0
    for stall in stalls:
        causes = stall["baton.causes"]
        first[causes[0] if causes else "usual"] += 1
        blamed += bool(causes and stall["baton.culprits"][0])
        for cause, ms in zip(causes, stall["baton.cause_ms"], strict=True):
            spent_ms[cause] += ms
    return Found(
        len(roots),
        len(stalls),
        share(_is_close(stall) for stall in stalls),
        blamed,
        dict(first.most_common()),
        {cause: round(ms, 1) for cause, ms in spent_ms.most_common()},
        share(_ttft_is_close(root) for root in roots),
    )


def share(held: Any) -> float:
    """Of those that are true; 1 of none."""
    all_of_them = list(held)
    return sum(all_of_them) / len(all_of_them) if all_of_them else 1.0


def _is_close(stall: dict[str, Any]) -> bool:
    total_ms = stall["baton.usual_ms"] + sum(stall["baton.cause_ms"])
    return bool(abs(total_ms - stall["baton.gap_ms"]) <= CLOSE * stall["baton.gap_ms"])


def _ttft_is_close(root: dict[str, Any]) -> bool:
    ttft_ms = root["baton.ttft_ms"]
    off_ms = abs(sum(root[f"baton.{part}_ms"] for part in TTFT_PARTS) - ttft_ms)
    return bool(off_ms <= max(TTFT_CLOSE_MS, TTFT_CLOSE * ttft_ms))


def cost_of(folder: Path, requests: int) -> Cost:
    """From what the processes wrote at their end."""
    written = {name: json.loads((folder / f"{name}.json").read_text()) for name in (*WORKERS, "router")}
    decode, router = written["decode-0"], written["router"]
    return Cost(
        decode["calls"]["steps"],
        decode["nanoseconds"]["steps"] / 1e6,
        {part: decode["nanoseconds"].get(part, 0) / 1e6 for part in WORKER_PARTS},
        {part: router["nanoseconds"].get(part, 0) / 1e3 / requests for part in ROUTER_PARTS},
    )


def picture(found: Found) -> str:
    shown = list(found.cause_ms.items())[:6]
    return draw_bars(
        BarChart(
            f"{found.stalls} stalls of {found.requests} requests: time by cause",
            Axis("milliseconds"),
            tuple(cause.replace("_", " ") for cause, _ in shown),
            (Bars("all stalls", tuple(ms for _, ms in shown)),),
        )
    )


def main() -> None:
    given = read_arguments(
        __doc__,
        model=(DEMO, "folder of a checkpoint"),
        requests=500,
        at_once=12,
        pictures=(None, "folder for the picture"),
    )
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        found, cost = asyncio.run(measure(given.model, given.requests, given.at_once, Path(folder)))
    print(f"{found.stalls} stalls of {found.requests} requests; {found.add_up:.1%} add up to within {CLOSE:.0%}")
    print(f"{found.blamed} name a request first; the TTFT of {found.ttft_adds_up:.1%} of the requests adds up")
    for cause, ms in found.cause_ms.items():
        print(f"  {cause:<22} {ms:10.1f} ms  first in {found.first_causes.get(cause, 0)}")
    print(
        f"{cost.steps} decode steps, {cost.steps_ms:.0f} ms of CPU; records and gaps: {cost.share_of_steps:.2%} of it"
    )
    for part, ms in cost.worker_ms.items():
        print(f"  {part:<22} {ms:10.1f} ms  {ms / cost.steps * 1e3:6.1f} us a step")
    for part, us in cost.router_us_per_request.items():
        print(f"  {part:<22} {us:10.1f} us a request in the router")
    write_pictures(given.pictures, {"stall-causes": picture(found)} if found.stalls else {})
    write_result(given.json, {**asdict(found), **asdict(cost), "share_of_steps": cost.share_of_steps})


if __name__ == "__main__":
    main()
