"""What is promised of the gateway beside clients that mean no good, and which of it a run's figures break.

    .venv/bin/python -m baton.lab.benchmarks.clients.abuse [--kinds malformed large ...] [--seconds 4] [--rounds 3]
                                               [--json FILE]

A gateway on a core of its own, workers that compute nothing and say a token every 20 ms, neighbours that stream.
Windows without and with an abuser (lab/benchmarks/clients/abusers.py, in a process of its own) take turns; `nothing` is
an abuser that does nothing, and shows what this measures of the machine itself. What counts is the ratio of the
neighbours' time between tokens with and without. Memory is that of the gateway and of the processes that help it,
beyond what they had before the first abuser. Exits with 1 where a promise was broken.
"""

import asyncio
import itertools
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from baton.lab.benchmarks.clients.abusers import KINDS
from baton.lab.benchmarks.clients.run import children, own_mib
from baton.lab.benchmarks.processes import tiny_model
from baton.lab.benchmarks.report.result import make_parser, write_result
from baton.lab.benchmarks.report.statistics import percentile
from baton.lab.benchmarks.router.streams import COMPLETIONS, UNENDING_TOKENS, Stack, connection, serving
from baton.launch.paths import ROOT

MOST_P50_RATIO = 1.05
MOST_P99_RATIO = 1.25
MOST_GROWTH_MIB = 256.0
"""Of the gateway and its helpers: two of those, with 40 MiB each, and the bodies and messages that are in hand."""

ANSWERS: Mapping[str, frozenset[str]] = {
    "nothing": frozenset(),
    "malformed": frozenset({"400"}),
    "large": frozenset({"200", "400", "413", "503"}),
    "large_messages": frozenset({"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}),
    "slow_readers": frozenset({"cut off"}),
    "half_open": frozenset({"408", "cut off", "reset by us"}),
    "slow_loris": frozenset({"408", "cut off"}),
}
"""What each kind of abuser may be answered: a clear error, or the end of its connection."""
INTERVAL_MS = 20.0
NEIGHBOURS = 16
SETTLE_S = 1.0
LOOK_S = 0.1


def broken(kind: str, found: Mapping[str, Any]) -> Iterator[str]:
    """The promises that these figures break, in words."""
    for name, most in (("p50_ratio", MOST_P50_RATIO), ("p99_ratio", MOST_P99_RATIO)):
        if found[name] > most:
            yield f"the neighbours' {name} is {found[name]}, and may be {most}"
    if found["growth_mib_beside"] > MOST_GROWTH_MIB:
        yield f"memory grew by {found['growth_mib_beside']} MiB, and may by {MOST_GROWTH_MIB:g}"
    if foreign := set(found["told"]) - ANSWERS[kind]:
        yield f"was answered {sorted(foreign)}"
    if kind != "nothing" and not found["told"]:
        yield "was answered nothing"


# Short, so that what is cut off is seen to be: the defaults are 10, 60 and 30 s.
LIMITS = ("--http-head-s", 2, "--http-body-s", 4, "--http-stall-s", 2)


@dataclass
class Neighbours:
    """Streams that are read as they come: when each one's chunks came."""

    chunks_s: list[list[float]] = field(default_factory=list)

    def gaps_ms(self, since_s: float, until_s: float) -> list[float]:
        found = []
        for times in self.chunks_s:
            within = [at for at in times if since_s <= at <= until_s]
            found += [1e3 * (later - sooner) for sooner, later in itertools.pairwise(within)]
        return found

    async def follow(self, target: str) -> None:
        times: list[float] = []
        self.chunks_s.append(times)
        async with connection(target) as stream:
            stream.ask(COMPLETIONS, UNENDING_TOKENS)
            while await stream.read():
                times.append(time.monotonic())
        raise RuntimeError("a neighbour's stream ended")


@dataclass(frozen=True, slots=True)
class Window:
    p50_ms: float
    p99_ms: float
    most_mib: float  # of own memory, of the gateway and its helpers
    answers: Counter[str]


async def measure(stack: Stack, neighbours: Neighbours, kind: str | None, seconds: float) -> Window:
    """With an abuser, or without."""
    async with _abuser(stack, kind, seconds + SETTLE_S) as abuser:
        await asyncio.sleep(SETTLE_S if kind is not None else SETTLE_S / 2)
        pids = processes(stack.pid)  # once: it takes long, and the neighbours are read by this process
        began_s, most_mib = time.monotonic(), 0.0
        while time.monotonic() - began_s < seconds:
            most_mib = max(most_mib, held_mib(pids))
            await asyncio.sleep(LOOK_S)
        gaps = neighbours.gaps_ms(began_s, time.monotonic())
        output = await abuser.stdout.read() if abuser is not None and abuser.stdout is not None else b"{}"
    return Window(percentile(gaps, 50), percentile(gaps, 99), most_mib, Counter(json.loads(output)))


def processes(pid: int) -> tuple[int, ...]:
    """A process and its children."""
    return (pid, *children(pid).values())


def held_mib(pids: Sequence[int]) -> float:
    """Own memory of all of them."""
    return sum(own_mib(each) or 0.0 for each in pids)


@asynccontextmanager
async def _abuser(stack: Stack, kind: str | None, seconds: float) -> AsyncIterator[asyncio.subprocess.Process | None]:
    if kind is None:
        yield None
        return
    ports = (*stack.http_target.split(":"), stack.target.rpartition(":")[2])
    command = (sys.executable, "-m", "baton.lab.benchmarks.clients.abusers", kind, *ports, f"{seconds:g}")
    abuser = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    try:
        if abuser.stdout is None or await abuser.stdout.readline() != b"begun\n":
            raise RuntimeError(f"{kind} did not begin")
        yield abuser
    finally:
        if abuser.returncode is None:
            abuser.terminate()
        await abuser.wait()


async def run_abuse(kinds: Sequence[str], seconds: float, rounds: int) -> dict[str, dict[str, Any]]:
    with tiny_model() as folder:
        gateway = serving(folder, INTERVAL_MS, *LIMITS)
        async with gateway as stack, asyncio.TaskGroup() as streams:
            neighbours = Neighbours()
            following = [streams.create_task(neighbours.follow(stack.http_target)) for _ in range(NEIGHBOURS)]
            found = {}
            await asyncio.sleep(SETTLE_S)
            before_mib = held_mib(processes(stack.pid))
            for kind in kinds:
                without, beside = [], []
                for _ in range(rounds):
                    without.append(await measure(stack, neighbours, None, seconds))
                    beside.append(await measure(stack, neighbours, kind, seconds))
                found[kind] = figures(without, beside, before_mib)
                print(f"{kind:14} {json.dumps(found[kind])}", flush=True)
            for each in following:
                each.cancel()
    return found


def figures(without: Sequence[Window], beside: Sequence[Window], before_mib: float) -> dict[str, Any]:
    """Medians of the rounds; memory is the most there was, beyond what there was before."""
    pairs = list(zip(without, beside, strict=True))
    return {
        "p50_ms": round(statistics.median(each.p50_ms for each in without), 2),
        "p50_ms_beside": round(statistics.median(each.p50_ms for each in beside), 2),
        "p50_ratio": round(statistics.median(with_.p50_ms / alone.p50_ms for alone, with_ in pairs), 3),
        "p99_ms": round(statistics.median(each.p99_ms for each in without), 2),
        "p99_ms_beside": round(statistics.median(each.p99_ms for each in beside), 2),
        "p99_ratio": round(statistics.median(with_.p99_ms / alone.p99_ms for alone, with_ in pairs), 3),
        "growth_mib": round(max(each.most_mib for each in without) - before_mib, 1),
        "growth_mib_beside": round(max(each.most_mib for each in beside) - before_mib, 1),
        "told": dict(sum((each.answers for each in beside), Counter[str]())),
    }


def main() -> int:
    parser = make_parser(__doc__, seconds=(4.0, "of each window"), rounds=3)
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    asked = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[1:] or cores)  # the first is the gateway's
    found = asyncio.run(run_abuse(asked.kinds, asked.seconds, asked.rounds))
    write_result(asked.json, {"kinds": found})
    faults = [f"{kind}: {fault}" for kind, each in found.items() for fault in broken(kind, each)]
    print("\n".join(faults) or "every promise was kept")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
