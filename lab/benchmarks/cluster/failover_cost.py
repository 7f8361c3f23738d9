"""What surviving failures costs while nothing fails: CPU time of the journal, of kept outputs, of checksums (of blocks
that are read elsewhere, and of cached ones), of saying which cached blocks are compared, and of confirming what has
landed of long pulls, as shares of what the decode worker's steps took in the same run.

    python -m baton.lab.benchmarks.cluster.failover_cost [--model FOLDER] [--requests 96] [--answer-tokens 128]
                                               [--json FILE]

Redis, a router, 1P+1D, each a process of its own that meters itself (wrapped_process.py). Prompts share
nothing, and several run at once. Attributed, not a difference of two runs. What Redis spends is not in it, nor what the
router's event loop spends on reading Redis' answers.
"""

import asyncio
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.lab.benchmarks.processes import HOST, Cluster, Program, our_program, ports_of, running, tiny_model
from baton.lab.benchmarks.report.result import read_arguments, write_result
from baton.lab.benchmarks.serve.load import Load, RandomJobs
from baton.lab.benchmarks.serve.targets import BatonTarget
from baton.launch import CommandFailed
from baton.process.registry.redis_server import free_port, start_redis_server

PARTS = ("journal", "kept outputs", "kept answers", "checksums", "at rest", "confirmations")
WORKERS = ("prefill-0", "decode-0")


@dataclass(frozen=True, slots=True)
class Asked:
    requests: int
    at_once: int
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Shares:
    """Of blocks whose checksums are compared: those that are read elsewhere, and cached ones that prompts use."""

    read: float
    cached: float


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time, all processes together."""

    steps: int  # of the decode worker
    steps_ms: float
    part_ms: dict[str, float]
    calls: dict[str, int]

    @property
    def shares(self) -> dict[str, float]:
        return {name: spent / self.steps_ms for name, spent in self.part_ms.items()}


def programs(folder: Path, model: Path, redis_url: str, cluster: Cluster, shares: Shares) -> list[Program]:
    registry = ("--redis-url", redis_url, "--log-level", "warning")

    def program(name: str, role: str, *flags: object) -> Program:
        metered = ("baton.lab.benchmarks.wrapped_process", "meter", role, folder / f"{name}.json")
        return our_program(name, folder, *metered, *flags, *registry)

    compared = ("--checksum-share", shares.read, "--kv-check-share", shares.cached)
    of_worker = ("--model", model, "--kv-memory", "128MiB", *compared)
    workers = [
        program(name, name.partition("-")[0], "--worker-id", name, "--port", free_port(), *of_worker)
        for name in WORKERS
    ]
    return [*workers, program("router", "router", *ports_of(cluster))]


async def ask(cluster: Cluster, asked: Asked) -> None:
    """Raises: CommandFailed where a request fails."""
    drawn = RandomJobs(asked.prompt_tokens, asked.answer_tokens, 0, 0.0, vocab_size=250, seed=7)
    target = BatonTarget(cluster.target)
    run = await Load(target.answer).closed_loop(drawn.draw([0.0] * asked.requests), asked.at_once)
    await target.close()
    if errors := [outcome.error for outcome in run.outcomes if outcome.error]:
        raise CommandFailed(errors[0])


async def measure(model: Path | None, asked: Asked, shares: Shares) -> Cost:
    redis = start_redis_server()
    try:
        with tiny_model() as folder:
            cluster = Cluster(f"{HOST}:{free_port()}", f"{HOST}:{free_port()}", len(WORKERS))
            async with running(
                programs(folder, model or folder / "tiny", redis.url, cluster, shares), cluster.is_ready
            ):
                await ask(cluster, asked)
            return cost_of(folder)
    finally:
        redis.stop()


def cost_of(folder: Path) -> Cost:
    """From what the processes wrote at their end."""
    written = {name: json.loads((folder / f"{name}.json").read_text()) for name in (*WORKERS, "router")}
    spent = {part: sum(each["nanoseconds"].get(part, 0) for each in written.values()) for part in PARTS}
    calls = {part: sum(each["calls"].get(part, 0) for each in written.values()) for part in PARTS}
    decode = written["decode-0"]
    part_ms = {part: nanoseconds / 1e6 for part, nanoseconds in spent.items()}
    return Cost(decode["calls"]["steps"], decode["nanoseconds"]["steps"] / 1e6, part_ms, calls)


def main() -> None:
    given = read_arguments(
        __doc__,
        model=(None, "folder of a checkpoint; default: a tiny one of random weights"),
        requests=96,
        at_once=8,
        prompt_tokens=256,
        answer_tokens=128,
        checksum_share=0.001,
        kv_check_share=0.01,
    )
    asked = Asked(given.requests, given.at_once, given.prompt_tokens, given.answer_tokens)
    cost = asyncio.run(measure(given.model, asked, Shares(given.checksum_share, given.kv_check_share)))
    print(f"{cost.steps} decode steps, {cost.steps_ms:.0f} ms of CPU")
    for part, share in cost.shares.items():
        print(f"  {part:<14} {cost.part_ms[part]:8.2f} ms  {share:7.3%} of step time  {cost.calls[part]} calls")
    print(f"  together       {sum(cost.part_ms.values()):8.2f} ms  {sum(cost.shares.values()):7.3%}")
    write_result(given.json, {"load": asdict(asked), **asdict(cost), "shares": cost.shares})


if __name__ == "__main__":
    main()
