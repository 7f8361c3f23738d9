"""Is a router's view of its workers' prefix caches true? Real processes, multi-turn conversations, two kills.

    .venv/bin/python -m baton.benchmarks.cluster.cache_view [--conversations 500] [--json FILE]

Starts `baton up` with 2P+2D on a tiny random model and pools that are far too small, so that blocks are evicted all
the time, and kills a decode worker after a third of the conversations and a prefill worker after two thirds. From the
trace: the share of requests of which the predicted cached tokens are the actual ones, on every worker that looked them
up; the others by what must have happened between decision and look-up. From the router's status, after the load: how
long after its restart a worker's cache was known exactly again, and whether all are at the end.
"""

import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from baton.benchmarks.cluster.cache_conversations import Shape, converse
from baton.benchmarks.processes import READY_S, Cluster, RunningProgram, baton_up
from baton.benchmarks.report.result import make_parser, write_result
from baton.launch.tiny_checkpoint import write_tiny_checkpoint

PREFIX = "baton.route."


@dataclass
class Side:
    """One kind of worker."""

    requests: int = 0
    equal: int = 0
    predicted_tokens: int = 0
    actual_tokens: int = 0
    causes: dict[str, int] = field(default_factory=dict)  # how many of the others

    def take(self, predicted: int, actual: int, ready: int) -> bool:
        self.requests += 1
        self.predicted_tokens += predicted
        self.actual_tokens += actual
        if predicted == actual:
            self.equal += 1
            return True
        cause = _cause(predicted, actual, ready)
        self.causes[cause] = self.causes.get(cause, 0) + 1
        return False


@dataclass
class Figures:
    """A request is equal if it is on every worker that looked its prompt up."""

    requests: int = 0
    equal: int = 0
    prefill: Side = field(default_factory=Side)
    decode: Side = field(default_factory=Side)

    @property
    def equal_share(self) -> float:
        return self.equal / self.requests if self.requests else 0.0


def _cause(predicted: int, actual: int, ready: int) -> str:
    """What must have happened between the decision and the look-up."""
    if actual > predicted:
        return "more had come"
    return "a prompt in flight did not bring it" if ready < predicted else "evicted meanwhile"


def figures(spans: Iterable[Mapping[str, Any]]) -> Figures:
    found = Figures()
    for span in spans:
        if span["name"] != "route.select":
            continue
        reported = {name.removeprefix(PREFIX): value for name, value in span["attributes"].items()}
        equal = []
        if "prefill_cached_tokens" in reported:
            ready = reported["prefill_ready_tokens"]
            equal.append(found.prefill.take(reported["prefill_hit_tokens"], reported["prefill_cached_tokens"], ready))
        if "decode_cached_tokens" in reported:
            predicted = reported["decode_hit_tokens"]
            equal.append(found.decode.take(predicted, reported["decode_cached_tokens"], ready=predicted))
        if equal:
            found.requests += 1
            found.equal += all(equal)
    return found


def read_spans(text: str) -> list[dict[str, Any]]:
    """Of a trace file; the last line may be half written."""
    complete, _, _ = text.rpartition("\n")
    return [json.loads(line) for line in complete.splitlines()]


WORKERS = 4
SETTLED_S = 10.0
POLL_S = 0.05


async def is_exact(cluster: Cluster) -> bool:
    """Whether the router's view of every worker equals the worker's own sum."""
    status = await cluster.status()
    if status is None or len([worker for worker in status.workers if worker.connected]) < WORKERS:
        return False
    return all(worker.cache_view is not None and worker.cache_view.exact for worker in status.workers)


async def kill(cluster: Cluster, role: str) -> float | None:
    """Kills a worker of that role; returns the seconds from its new connection until it was known exactly."""
    status = await cluster.status()
    victim = next(worker for worker in (status.workers if status else ()) if worker.role == role)
    os.kill(victim.pid, signal.SIGKILL)
    connected_s = None
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        status = await cluster.status()
        for worker in status.workers if status else ():
            if worker.worker_id == victim.worker_id and worker.connected and worker.epoch != victim.epoch:
                connected_s = connected_s or time.monotonic()
                if worker.cache_view is not None and worker.cache_view.exact:
                    return time.monotonic() - connected_s
        await asyncio.sleep(POLL_S)
    return None


async def measure(shape: Shape, kv_memory: str, kills: Sequence[str]) -> dict[str, object]:
    """`kills`: roles of which a worker is killed, spread evenly over the conversations."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_checkpoint(folder / "tiny")
        flags = ("--model", folder / "tiny", "--http-port", 0, "--prefill", 2, "--decode", 2, "--kv-memory", kv_memory)
        program, cluster = baton_up(folder, WORKERS, *flags)
        async with RunningProgram(program) as running:
            await running.wait_until(cluster.is_ready)
            killing: list[asyncio.Task[float | None]] = []

            def on_ended(ended: int) -> None:
                if len(killing) < len(kills) and ended >= (len(killing) + 1) * shape.conversations // (len(kills) + 1):
                    killing.append(asyncio.create_task(kill(cluster, kills[len(killing)])))

            began = time.monotonic()
            outcome = await converse(cluster.target, shape, 1, on_ended)
            took_s = time.monotonic() - began
            back_s = await asyncio.gather(*killing)
            await running.wait_until(lambda: is_exact(cluster), SETTLED_S)
            status = await cluster.status()
        found = figures(read_spans((folder / "up.jsonl").read_text()))
    caches = {
        worker.worker_id: asdict(worker.cache_view)
        for worker in (status.workers if status else ())
        if worker.cache_view
    }
    return {
        "equal_share": round(found.equal_share, 5),
        **asdict(found),
        "load": {**asdict(outcome), "seconds": round(took_s, 1)},
        "exact_after_restart_s": [None if each is None else round(each, 2) for each in back_s],
        "caches": caches,
        "indexed_blocks": status.indexed_blocks if status else 0,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--kv-memory", default="12MiB", help="of each worker; 32 KiB a block of 32 tokens")
    parser.add_argument("--no-kill", action="store_true", help="leave all workers alone")
    arguments = parser.parse_args()
    kills = () if arguments.no_kill else ("decode", "prefill")
    shape = Shape(arguments.conversations, arguments.at_once)
    result = asyncio.run(measure(shape, arguments.kv_memory, kills))
    print(json.dumps(result, indent=2))
    write_result(arguments.json, result)


if __name__ == "__main__":
    main()
