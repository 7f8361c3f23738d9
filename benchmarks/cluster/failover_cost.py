"""What surviving failures costs while nothing fails: CPU time of the journal, of kept outputs, of checksums, and of
confirming what has landed of long pulls, as shares of what the decode worker's steps took in the same run.

    .venv/bin/python -m baton.benchmarks.cluster.failover_cost [--model FOLDER] [--requests 96] [--answer-tokens 128]
                                               [--json FILE]

Redis, a router, 1P+1D, each a process of its own that meters itself (metered_process.py). Prompts share
nothing, and several run at once. Attributed, not a difference of two runs. What Redis spends is not in it, nor what the
router's event loop spends on reading Redis' answers.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.benchmarks.isolation.stack import OUR_CODE, Program, RunningProgram
from baton.benchmarks.report.machine import describe_machine
from baton.client import AsyncAdminClient, AsyncBatonClient, BatonClientError, RetryPolicy
from baton.launch.tiny_checkpoint import write_tiny_checkpoint
from baton.service.registry.redis_server import free_port, start_redis_server

READY_S = 120.0
PARTS = ("journal", "kept outputs", "kept answers", "checksums", "confirmations")
WORKERS = ("prefill-0", "decode-0")


@dataclass(frozen=True, slots=True)
class Load:
    requests: int
    at_once: int
    prompt_tokens: int
    answer_tokens: int


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


def programs(folder: Path, model: Path, redis_url: str, port: int, admin: int, share: float) -> list[Program]:
    environment = {**OUR_CODE, "OMP_NUM_THREADS": "1"}
    cores = tuple(sorted(os.sched_getaffinity(0)))
    registry = ("--redis-url", redis_url, "--log-level", "warning")

    def program(name: str, role: str, *flags: object) -> Program:
        metered = ("-m", "baton.benchmarks.cluster.metered_process", role, str(folder / f"{name}.json"))
        command = (sys.executable, "-P", *metered, *map(str, (*flags, *registry)))
        return Program(name, command, cores, folder / f"{name}.log", environment)

    of_worker = ("--model", model, "--kv-memory", "128MiB", "--checksum-share", share)
    workers = [
        program(name, name.partition("-")[0], "--worker-id", name, "--port", free_port(), *of_worker)
        for name in WORKERS
    ]
    return [*workers, program("router", "router", "--port", port, "--admin-port", admin)]


async def ready(admin_port: int) -> bool:
    async with AsyncAdminClient(f"127.0.0.1:{admin_port}", retry=RetryPolicy(attempts=1)) as admin:
        try:
            status = await admin.status()
        except BatonClientError:
            return False
    return status.ready and not status.detail and sum(worker.connected for worker in status.workers) == len(WORKERS)


async def ask(port: int, load: Load) -> None:
    draw, free = random.Random(7), asyncio.Semaphore(load.at_once)
    prompts = [[draw.randrange(3, 250) for _ in range(load.prompt_tokens)] for _ in range(load.requests)]
    async with AsyncBatonClient(f"127.0.0.1:{port}", timeout_s=120) as baton:

        async def one(prompt: Sequence[int]) -> None:
            async with free:
                await baton.complete(prompt, max_tokens=load.answer_tokens, ignore_eos=True)

        await asyncio.gather(*map(one, prompts))


async def measure(model: Path | None, load: Load, share: float) -> Cost:
    redis, port, admin = start_redis_server(), free_port(), free_port()
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if model is None:
                model = folder / "tiny"
                write_tiny_checkpoint(model)
            async with AsyncExitStack() as stack:
                for program in programs(folder, model, redis.url, port, admin, share):
                    running = await stack.enter_async_context(RunningProgram(program))
                await running.wait_until(lambda: ready(admin), READY_S)
                await ask(port, load)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a checkpoint; default: a tiny one of random weights")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--checksum-share", type=float, default=0.001)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    load = Load(given.requests, given.at_once, given.prompt_tokens, given.answer_tokens)
    cost = asyncio.run(measure(given.model, load, given.checksum_share))
    print(f"{cost.steps} decode steps, {cost.steps_ms:.0f} ms of CPU")
    for part, share in cost.shares.items():
        print(f"  {part:<14} {cost.part_ms[part]:8.2f} ms  {share:7.3%} of step time  {cost.calls[part]} calls")
    print(f"  together       {sum(cost.part_ms.values()):8.2f} ms  {sum(cost.shares.values()):7.3%}")
    if given.json is not None:
        result = {"machine": describe_machine(), "load": asdict(load), **asdict(cost), "shares": cost.shares}
        given.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
