"""What becomes of a service that is asked for more than it can do, and of a quiet caller beside a noisy one.

    .venv/bin/python -m baton.benchmarks.cluster.overload [--seconds 15] [--json FILE]
                                               [--picture docs/performance/overload.svg]

One prefill worker, one decode worker of few slots and a router, on a tiny model, all real processes. First the
capacity: answers a second with twice as many calls at once as there are slots. Then calls come at random (Poisson) at
multiples of it, however many are unanswered. Each has a deadline; goodput counts the answers that were complete by
then. Last, a noisy caller at ten times the capacity and a quiet one at a fifth of it, each with an API key of its own,
and the quiet one by itself.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.benchmarks.isolation.stack import OUR_CODE, Program, RunningProgram
from baton.benchmarks.report.machine import describe_machine
from baton.benchmarks.report.picture import Axis, Curve, LineChart, draw_lines
from baton.benchmarks.report.statistics import percentile
from baton.client import (
    AsyncAdminClient,
    AsyncBatonClient,
    BatonClientError,
    Busy,
    DeadlineExceeded,
    Delta,
    RetryPolicy,
)
from baton.launch.tiny_checkpoint import write_tiny_checkpoint
from baton.service.registry.redis_server import free_port

MULTIPLES = (0.5, 1.0, 2.0, 5.0, 10.0)
NOISY, QUIET = 10.0, 0.2
READY_S = 60.0
ONCE = RetryPolicy(attempts=1)


@dataclass(frozen=True, slots=True)
class Setup:
    slots: int
    prompt_tokens: int
    answer_tokens: int
    deadline_s: float
    seconds: float  # of each measurement


@dataclass(frozen=True, slots=True)
class Call:
    """What became of one call. Seconds after the beginning of the measurement."""

    sent_s: float
    ended_s: float
    ttft_s: float | None  # None: no token came
    result: str  # "answered", "refused" or "late"
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    multiple: float  # of the capacity
    offered_per_s: float
    goodput_per_s: float  # complete answers that came in time
    answered: int
    refused: int
    late: int  # ended by their deadline: what was computed for them was for nothing
    ttft_p50_ms: float
    ttft_p95_ms: float
    refusal_p95_ms: float  # how long it took to be told so
    retry_after_p50_s: float


@dataclass(frozen=True, slots=True)
class Report:
    setup: Setup
    capacity_per_s: float
    load: tuple[Measured, ...]
    quiet_alone: Measured
    quiet_beside_noisy: Measured
    noisy: Measured

    @property
    def kept(self) -> float:
        """Goodput at the largest multiple, as a share of the best."""
        return self.load[-1].goodput_per_s / max(each.goodput_per_s for each in self.load)


class Caller:
    """Calls one router, each time with a prompt that nobody asked before."""

    def __init__(self, target: str, setup: Setup, api_key: str, seed: int) -> None:
        self._baton = AsyncBatonClient(target, retry=ONCE)
        self._setup, self._api_key = setup, api_key
        self._chance = random.Random(seed)

    async def close(self) -> None:
        await self._baton.close()

    async def open_loop(self, rate_per_s: float, began_s: float) -> list[Call]:
        """Calls at random moments, from now until `seconds` after the beginning."""
        calls, due_s = [], began_s
        async with asyncio.TaskGroup() as tasks:
            while (due_s := due_s + self._chance.expovariate(rate_per_s)) < began_s + self._setup.seconds:
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                calls.append(tasks.create_task(self.call(began_s)))
        return [call.result() for call in calls]

    async def closed_loop(self, concurrency: int, began_s: float) -> list[Call]:
        """So many at once, until `seconds` after the beginning."""

        async def one_after_another() -> list[Call]:
            calls = []
            while time.monotonic() < began_s + self._setup.seconds:
                calls.append(await self.call(began_s))
            return calls

        return [
            call for calls in await asyncio.gather(*(one_after_another() for _ in range(concurrency))) for call in calls
        ]

    async def call(self, began_s: float) -> Call:
        setup = self._setup
        prompt = [self._chance.randrange(3, 259) for _ in range(setup.prompt_tokens)]
        sent_s, first_s, result, retry_after_s = time.monotonic(), None, "answered", None
        events = self._baton.generate(
            prompt, max_tokens=setup.answer_tokens, ignore_eos=True, api_key=self._api_key, timeout_s=setup.deadline_s
        )
        try:
            async for event in events:
                if first_s is None and isinstance(event, Delta):
                    first_s = time.monotonic()
        except Busy as busy:
            result, retry_after_s = "refused", busy.retry_after_s
        except DeadlineExceeded:
            result = "late"
        ttft_s = None if first_s is None else first_s - sent_s
        return Call(sent_s - began_s, time.monotonic() - began_s, ttft_s, result, retry_after_s)


async def measure(target: str, setup: Setup, capacity_per_s: float, multiples: dict[str, float]) -> dict[str, Measured]:
    """Callers at once, by API key, at these multiples of the capacity."""
    callers = {key: Caller(target, setup, key, seed) for seed, key in enumerate(multiples)}
    began_s = time.monotonic()
    runs = await asyncio.gather(
        *(caller.open_loop(multiples[key] * capacity_per_s, began_s) for key, caller in callers.items())
    )
    for caller in callers.values():
        await caller.close()
    return {key: summarise(calls, multiples[key], setup) for key, calls in zip(callers, runs, strict=True)}


def summarise(calls: list[Call], multiple: float, setup: Setup) -> Measured:
    """Goodput over the time from the first moment at which the queue may be full to the end of the arrivals."""
    results = Counter(call.result for call in calls)
    warm_s = min(setup.deadline_s, setup.seconds / 3)
    good = [call for call in calls if call.result == "answered" and warm_s <= call.ended_s <= setup.seconds]
    ttfts = [1e3 * call.ttft_s for call in calls if call.ttft_s is not None]
    refused = [call for call in calls if call.result == "refused"]
    return Measured(
        multiple=multiple,
        offered_per_s=len(calls) / setup.seconds,
        goodput_per_s=len(good) / (setup.seconds - warm_s),
        answered=results["answered"],
        refused=results["refused"],
        late=results["late"],
        ttft_p50_ms=percentile(ttfts, 50) if ttfts else 0.0,
        ttft_p95_ms=percentile(ttfts, 95) if ttfts else 0.0,
        refusal_p95_ms=percentile([1e3 * (call.ended_s - call.sent_s) for call in refused], 95) if refused else 0.0,
        retry_after_p50_s=percentile([call.retry_after_s or 0.0 for call in refused], 50) if refused else 0.0,
    )


async def measure_all(setup: Setup) -> Report:
    with tempfile.TemporaryDirectory(prefix="baton-overload-") as scratch:
        folder = Path(scratch)
        write_tiny_checkpoint(folder / "tiny")
        async with stack(folder, setup.slots) as target:
            caller = Caller(target, setup, "capacity", seed=99)
            await caller.closed_loop(2 * setup.slots, time.monotonic())  # warms everything up
            calls = await caller.closed_loop(2 * setup.slots, time.monotonic())
            capacity_per_s = summarise(calls, 1.0, setup).goodput_per_s
            await caller.close()
            print(f"capacity: {capacity_per_s:.2f} answers/s", file=sys.stderr)
            load = []
            for multiple in MULTIPLES:
                load.append((await measure(target, setup, capacity_per_s, {"one": multiple}))["one"])
                print(as_line(load[-1]), file=sys.stderr)
            alone = await measure(target, setup, capacity_per_s, {"quiet": QUIET})
            beside = await measure(target, setup, capacity_per_s, {"quiet": QUIET, "noisy": NOISY})
    return Report(setup, capacity_per_s, tuple(load), alone["quiet"], beside["quiet"], beside["noisy"])


@asynccontextmanager
async def stack(folder: Path, slots: int) -> AsyncIterator[str]:
    """The three processes; the router's target."""
    port, admin, prefill, decode = (free_port() for _ in range(4))
    model = ("--model", str(folder / "tiny"), "--kv-memory", "64MiB", "--log-level", "warning")
    members = f"prefill@127.0.0.1:{prefill},decode@127.0.0.1:{decode}"
    programs = (
        ("prefill", ("baton.prefill_worker", "--worker-id", "prefill-0", "--port", prefill, *model)),
        (
            "decode",
            ("baton.decode_worker", "--worker-id", "decode-0", "--port", decode, *model, "--max-sequences", slots),
        ),
        (
            "router",
            ("baton.router", "--port", port, "--admin-port", admin, "--workers", members, "--log-level", "warning"),
        ),
    )
    environment = {**OUR_CODE, "OMP_NUM_THREADS": "1"}
    p, d, r = (
        Program(name, (sys.executable, "-P", "-m", *map(str, flags)), _cores(), folder / f"{name}.log", environment)
        for name, flags in programs
    )

    async def ready() -> bool:
        try:
            async with AsyncAdminClient(f"127.0.0.1:{admin}", timeout_s=1.0, retry=ONCE) as operator:
                status = await operator.status()
        except BatonClientError:
            return False
        return status.ready and not status.detail

    async with RunningProgram(p), RunningProgram(d), RunningProgram(r) as router:
        await router.wait_until(ready, READY_S)
        yield f"127.0.0.1:{port}"


def _cores() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0)))


def as_line(each: Measured) -> str:
    return (
        f"{each.multiple:5.1f} x  offered {each.offered_per_s:7.2f}/s  goodput {each.goodput_per_s:6.2f}/s  answered "
        f"{each.answered:4d}  refused {each.refused:5d}  late {each.late:3d}  TTFT p50 {each.ttft_p50_ms:7.1f} ms, p95 "
        f"{each.ttft_p95_ms:7.1f} ms  refused within {each.refusal_p95_ms:5.1f} ms (p95)  come back in "
        f"{each.retry_after_p50_s:.2f} s (p50)"
    )


def as_lines(report: Report) -> list[str]:
    setup, quiet, beside = report.setup, report.quiet_alone, report.quiet_beside_noisy
    return [
        f"capacity {report.capacity_per_s:.2f} answers/s: {setup.slots} slots, {setup.prompt_tokens} prompt tokens, "
        f"{setup.answer_tokens} tokens of answer, deadline {setup.deadline_s:g} s",
        *map(as_line, report.load),
        f"goodput at {report.load[-1].multiple:g} x: {report.kept:.1%} of its peak",
        f"a quiet caller at {QUIET:g} x, alone: {as_line(quiet)}",
        f"beside a noisy one at {NOISY:g} x:    {as_line(beside)}",
        f"the noisy one:              {as_line(report.noisy)}",
    ]


def as_picture(report: Report) -> str:
    points = tuple((each.multiple, each.goodput_per_s) for each in report.load)
    offered = tuple((each.multiple, min(each.multiple, 1.0) * report.capacity_per_s) for each in report.load)
    chart = LineChart(
        "Answers in time, by load",
        Axis("offered load, as a multiple of the capacity", is_log=True, ticks=(0.5, 1, 2, 5, 10)),
        Axis("answers per second"),
        (Curve("answered within the deadline", points), Curve("offered, up to the capacity", offered, is_dashed=True)),
    )
    return draw_lines(chart)


def main() -> None:
    parser = argparse.ArgumentParser(description="Goodput under overload, and a quiet caller beside a noisy one.")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement")
    parser.add_argument("--slots", type=int, default=4, help="sequences that the decode worker runs at once")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--answer-tokens", type=int, default=192)
    parser.add_argument("--deadline", type=float, default=4.0, help="of each call, in seconds")
    parser.add_argument("--picture", type=Path, help="an SVG")
    parser.add_argument("--json", type=Path, help="all figures")
    options = parser.parse_args()
    setup = Setup(options.slots, options.prompt_tokens, options.answer_tokens, options.deadline, options.seconds)
    report = asyncio.run(measure_all(setup))
    print("\n".join(as_lines(report)))
    if options.json is not None:
        result = {"machine": describe_machine(), "kept": report.kept, **asdict(report)}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if options.picture is not None:
        options.picture.parent.mkdir(parents=True, exist_ok=True)
        options.picture.write_text(as_picture(report))


if __name__ == "__main__":
    main()
