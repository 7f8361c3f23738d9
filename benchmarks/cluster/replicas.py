"""Do several routers behave as one? The same conversations through one router and through several, on real processes.

    .venv/bin/python -m baton.benchmarks.cluster.replicas [--rounds 3] [--routers 2] [--conversations 120] [--json]

Each time `baton up` is started anew with 2P+2D on a tiny random model and pools that are too small for all that is
said. With several routers every turn of a conversation goes to one drawn at random, which is the worst that clients
can do. From the answers: the share of prompt tokens that came from a cache, time to the first token, failures. From
`baton explain`: how evenly prompts were dealt to the prefill workers.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from baton.benchmarks.isolation.stack import OUR_CODE, Program, RunningProgram
from baton.benchmarks.report.statistics import median, percentile
from baton.client import AsyncAdminClient, AsyncBatonClient, BatonClientError, Finished
from baton.launch.tiny_checkpoint import write_tiny_checkpoint
from baton.service.registry.redis_server import free_port

READY_S = 120.0
FIRST_TOKEN, LAST_TOKEN = 10, 200
WORKERS = 4


@dataclass(frozen=True, slots=True)
class Talk:
    """Lengths in tokens."""

    conversations: int
    at_once: int = 12
    turns: int = 4
    systems: int = 6
    system_tokens: int = 160
    question_tokens: int = 60
    answer_tokens: int = 16
    pause_s: float = 0.2


@dataclass
class Tally:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    failed: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    names: list[tuple[int, str]] = field(default_factory=list)  # of requests, with the router that served each


@dataclass(frozen=True, slots=True)
class Run:
    routers: int
    requests: int
    failed: int
    hit_rate: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    busiest_prefill_share: float  # of the prompts that a prefill worker computed; 0.5 is even


class Service:
    """`baton up` with so many routers."""

    def __init__(self, folder: Path, routers: int, kv_memory: str) -> None:
        first = _free_ports(2 * routers)
        self.ports = [(first + 2 * number, first + 2 * number + 1) for number in range(routers)]
        write_tiny_checkpoint(folder / "tiny")
        command = [sys.executable, "-P", "-m", "baton.cli", "up", "--device", "cpu", "--model", str(folder / "tiny")]
        command += ["--port", str(first), "--admin-port", str(first + 1), "--routers", str(routers)]
        command += ["--prefill", "2", "--decode", "2", "--kv-memory", kv_memory, "--planner", "off"]
        command += ["--trace-file", str(folder / "trace.jsonl")]
        environment = {**OUR_CODE, "OMP_NUM_THREADS": "1"}
        self.program = Program("up", tuple(command), (), folder / "up.log", environment)

    async def ready(self) -> bool:
        for _, admin_port in self.ports:
            try:
                async with AsyncAdminClient(f"127.0.0.1:{admin_port}", timeout_s=2.0) as admin:
                    status = await admin.status()
            except BatonClientError:
                return False
            heard = status.other_routers == len(self.ports) - 1
            if not status.ready or not heard or sum(worker.connected for worker in status.workers) < WORKERS:
                return False
        return True

    async def prefill_shares(self, names: Sequence[tuple[int, str]]) -> Counter[str]:
        """How many prompts each prefill worker computed."""
        chosen: Counter[str] = Counter()
        for number, (_, admin_port) in enumerate(self.ports):
            async with AsyncAdminClient(f"127.0.0.1:{admin_port}") as admin:
                for router, name in names:
                    if router != number:
                        continue
                    attempts = (await admin.explain(name)).attempts
                    chosen.update(each.worker_id for each in attempts[-1].candidates if each.chosen)
        return Counter({name: count for name, count in chosen.items() if name.startswith("prefill")})


async def measure(routers: int, talk: Talk, kv_memory: str, seed: int) -> Run:
    with tempfile.TemporaryDirectory() as name:
        service = Service(Path(name), routers, kv_memory)
        async with RunningProgram(service.program) as program:
            await program.wait_until(service.ready, READY_S)
            tally = await converse([port for port, _ in service.ports], talk, seed)
            shares = await service.prefill_shares(tally.names[-1000:])
    return Run(
        routers,
        len(tally.names),
        tally.failed,
        tally.cached_tokens / max(1, tally.prompt_tokens),
        percentile(tally.ttft_ms, 50),
        percentile(tally.ttft_ms, 95),
        max(shares.values(), default=0) / max(1, shares.total()),
    )


async def converse(ports: Sequence[int], talk: Talk, seed: int) -> Tally:
    """The same prompts for the same seed, whatever the number of routers."""
    tally, drawn = Tally(), random.Random(seed)
    systems = [_tokens(drawn, talk.system_tokens) for _ in range(talk.systems)]
    seeds = iter([drawn.randrange(2**32) for _ in range(talk.conversations)])
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(AsyncBatonClient(f"127.0.0.1:{port}", timeout_s=60)) for port in ports
        ]

        async def lane() -> None:
            for own in seeds:
                await _conversation(clients, talk, random.Random(own), systems, tally)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(talk.at_once):
                tasks.create_task(lane())
    return tally


async def _conversation(
    clients: Sequence[AsyncBatonClient], talk: Talk, drawn: random.Random, systems: list[list[int]], tally: Tally
) -> None:
    history = list(drawn.choice(systems))
    for _ in range(talk.turns):
        history += _tokens(drawn, talk.question_tokens)
        router, request_id = drawn.randrange(420) % len(clients), f"turn-{drawn.randrange(2**60)}"
        answer: list[int] = []
        try:
            async for event in clients[router].generate(
                history, max_tokens=talk.answer_tokens, ignore_eos=True, request_id=request_id
            ):
                answer += getattr(event, "token_ids", ())
                if isinstance(event, Finished) and event.usage and event.timings:
                    tally.prompt_tokens += event.usage.prompt_tokens
                    tally.cached_tokens += event.usage.cached_tokens
                    tally.ttft_ms.append(event.timings.ttft_ms)
        except BatonClientError:
            tally.failed += 1
            return
        tally.names.append((router, request_id))
        history += answer
        await asyncio.sleep(drawn.uniform(0.0, talk.pause_s))


def _tokens(drawn: random.Random, count: int) -> list[int]:
    return [drawn.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]


def _free_ports(count: int) -> int:
    """The first of so many that are probably free, one after another."""
    return min(free_port(), 32_000 - count)


def summary(runs: Sequence[Run]) -> dict[str, object]:
    """Medians by the number of routers, and by how much hit rates differ, in points."""
    by_routers = {
        number: [run for run in runs if run.routers == number] for number in sorted({run.routers for run in runs})
    }
    rates = {number: median([run.hit_rate for run in those]) for number, those in by_routers.items()}
    return {
        "hit_rate": {number: round(rate, 4) for number, rate in rates.items()},
        "hit_rate_difference_points": round(100 * (max(rates.values()) - min(rates.values())), 2),
        "ttft_p50_ms": {n: round(median([run.ttft_p50_ms for run in those]), 1) for n, those in by_routers.items()},
        "busiest_prefill_share": {
            n: round(median([run.busiest_prefill_share for run in those]), 3) for n, those in by_routers.items()
        },
        "failed": sum(run.failed for run in runs),
        "runs": [asdict(run) for run in runs],
    }


async def compare(routers: int, rounds: int, talk: Talk, kv_memory: str, seed: int) -> dict[str, object]:
    """One router and several by turns, the first of a round changing."""
    runs: list[Run] = []
    for number in range(rounds):
        for count in (1, routers) if (seed + number) % 2 == 0 else (routers, 1):
            runs.append(await measure(count, talk, kv_memory, seed + number))
            print(runs[-1], file=sys.stderr, flush=True)
    return summary(runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--routers", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0, help="of the first round's conversations")
    parser.add_argument("--kv-memory", default="12MiB", help="of each worker; 32 KiB a block of 32 tokens")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    talk = Talk(arguments.conversations)
    result = asyncio.run(compare(arguments.routers, arguments.rounds, talk, arguments.kv_memory, arguments.seed))
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
