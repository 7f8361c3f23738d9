"""The load shifts from long prompts to long answers, on two prefill workers and one decode worker: with roles that
stay as they were, and with a planner that may change them.

    .venv/bin/python -m baton.benchmarks.cluster.role_change [--seconds 30] [--folder docs/role_change] [--json]

Real processes: router and workers that can change their roles, whose steps take as long as on a device of their own
(paced_worker.py), so that two cores suffice. Calls come at random (Poisson): for a while long prompts with
short answers, a fifth more than one prefill worker can do; then short prompts with long answers, half as many again as
one decode worker can do. Every call has a deadline; goodput counts the answers that were complete by then, over time.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from baton.benchmarks.isolation.stack import OUR_CODE, Program, RunningProgram
from baton.benchmarks.report.machine import describe_machine
from baton.benchmarks.report.picture import Axis, Curve, LineChart, draw_lines
from baton.benchmarks.report.statistics import median
from baton.client import AsyncAdminClient, AsyncBatonClient, BatonClientError, Delta, RetryPolicy
from baton.launch.tiny_checkpoint import write_tiny_checkpoint
from baton.service.registry.redis_server import free_port

READY_S = 60.0
BUCKET_S = 2.0
PROMPTS_OVER, ANSWERS_OVER = 1.2, 1.5
"""How many times as often as one worker of the role could do it either kind comes."""
ONCE = RetryPolicy(attempts=1)


@dataclass(frozen=True, slots=True)
class Kind:
    prompt_tokens: int
    answer_tokens: int


LONG_PROMPTS, LONG_ANSWERS = Kind(480, 4), Kind(32, 160)
STEP_MS, TOKEN_MS = 8.0, 0.25


@dataclass(frozen=True, slots=True)
class Setup:
    seconds: float  # of each phase; the second takes three times as long
    slots: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Call:
    """Seconds after the beginning."""

    sent_s: float
    ended_s: float
    ttft_ms: float | None
    tbt_ms: float | None  # mean between its tokens
    result: str  # "answered", "late" or "refused"; "failed" is none of these


@dataclass
class Timeline:
    """One run: by buckets of BUCKET_S."""

    planner: str
    calls: list[Call] = field(default_factory=list)
    decode_workers: list[tuple[float, int]] = field(default_factory=list)  # at each look

    def points(
        self, value: Callable[[list[Call]], float | None], at: Callable[[Call], float]
    ) -> list[tuple[float, float]]:
        end_s = max((call.ended_s for call in self.calls), default=0.0)
        found = []
        for bucket in range(int(end_s / BUCKET_S)):
            here = [call for call in self.calls if bucket * BUCKET_S <= at(call) < (bucket + 1) * BUCKET_S]
            measured = value(here)
            if measured is not None:
                found.append(((bucket + 0.5) * BUCKET_S, measured))
        return found

    @property
    def goodput(self) -> list[tuple[float, float]]:
        return self.points(
            lambda calls: sum(call.result == "answered" for call in calls) / BUCKET_S, lambda call: call.ended_s
        )

    @property
    def ttft(self) -> list[tuple[float, float]]:
        return self.points(lambda calls: _median([c.ttft_ms for c in calls]), lambda call: call.sent_s)

    @property
    def tbt(self) -> list[tuple[float, float]]:
        return self.points(lambda calls: _median([c.tbt_ms for c in calls]), lambda call: call.sent_s)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


class Service:
    """Router, 2P+1D; entered it serves."""

    def __init__(self, folder: Path, slots: int, planner: str) -> None:
        self.port, self._admin = free_port(), free_port()
        model = ("--model", str(folder / "tiny"), "--kv-memory", "64MiB")
        members: list[str] = []
        self._programs: list[Program] = []
        environment = {**OUR_CODE, "OMP_NUM_THREADS": "1"}
        cores = tuple(sorted(os.sched_getaffinity(0)))

        def program(name: str, *flags: object) -> None:
            command = (sys.executable, "-P", "-m", *map(str, flags))
            log = folder / f"{planner}-{name}.log"
            self._programs.append(Program(name, command, cores, log, environment))

        for name in ("prefill-0", "prefill-1", "decode-0"):
            port, role = free_port(), name.partition("-")[0]
            flags = ("--role", role, "--worker-id", name, "--port", port, "--max-sequences", slots)
            pace = ("--decode-step-ms", STEP_MS, "--prefill-token-ms", TOKEN_MS)
            program(name, "baton.benchmarks.cluster.paced_worker", *flags, *pace, *model)
            members.append(f"{role}@127.0.0.1:{port}")
        slos = ("--ttft-slo-ms", 1000, "--tbt-slo-ms", 100)
        planning = ("--planner", planner, "--planner-hold-s", 2, "--planner-cool-down-s", 15)
        ports = ("--port", self.port, "--admin-port", self._admin)
        program("router", "baton.router", *ports, "--workers", ",".join(members), *slos, *planning)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            running = [await stack.enter_async_context(RunningProgram(program)) for program in self._programs]
            await running[-1].wait_until(self._ready, READY_S)
            yield

    async def _ready(self) -> bool:
        try:
            return (await self.decode_workers()) == 1
        except BatonClientError:
            return False

    async def decode_workers(self) -> int:
        """That serve now. 0 while the service is not whole."""
        async with AsyncAdminClient(f"127.0.0.1:{self._admin}", timeout_s=2.0, retry=ONCE) as admin:
            status = await admin.status()
        serving = [each for each in status.workers if each.connected and each.load and not each.load.draining]
        return sum(each.role == "decode" for each in serving) if status.ready and len(status.workers) == 3 else 0


class Caller:
    def __init__(self, baton: AsyncBatonClient, setup: Setup, timeline: Timeline) -> None:
        self._baton = baton
        self._setup = setup
        self._timeline = timeline
        self._drawn = random.Random(5)
        self._began_s = time.monotonic()

    async def poisson(self, kind: Kind, per_s: float, seconds: float, tasks: asyncio.TaskGroup) -> None:
        """Calls at random moments, however many are unanswered."""
        end_s = time.monotonic() + seconds
        while (now := time.monotonic()) < end_s:
            tasks.create_task(self.call(kind))
            await asyncio.sleep(max(0.0, now + self._drawn.expovariate(per_s) - time.monotonic()))

    async def call(self, kind: Kind) -> None:
        sent = time.monotonic()
        first = last = None
        tokens = 0
        prompt = [self._drawn.randrange(10, 200) for _ in range(kind.prompt_tokens)]
        try:
            async for event in self._baton.generate(
                prompt, max_tokens=kind.answer_tokens, ignore_eos=True, timeout_s=self._setup.deadline_s
            ):
                if isinstance(event, Delta):
                    last = time.monotonic()
                    first, tokens = first or last, tokens + len(event.token_ids)
            result = "answered"
        except BatonClientError as error:
            result = {"DEADLINE_EXCEEDED": "late", "RESOURCE_EXHAUSTED": "refused"}.get(error.code.name, "failed")
        gap_ms = (last - first) / (tokens - 1) * 1e3 if first and last and tokens > 16 else None
        ttft_ms = None if first is None else (first - sent) * 1e3
        ended_s = time.monotonic() - self._began_s
        self._timeline.calls.append(Call(sent - self._began_s, ended_s, ttft_ms, gap_ms, result))


def rates(setup: Setup) -> tuple[float, float]:
    """Calls a second of the first and of the second phase."""
    prompts_per_s = 1e3 / (LONG_PROMPTS.prompt_tokens * TOKEN_MS)
    answers_per_s = setup.slots * 1e3 / (LONG_ANSWERS.answer_tokens * STEP_MS)
    return PROMPTS_OVER * prompts_per_s, ANSWERS_OVER * answers_per_s


async def run(folder: Path, setup: Setup, planner: str, prompts_per_s: float, answers_per_s: float) -> Timeline:
    timeline, service = Timeline(planner), Service(folder, setup.slots, planner)
    async with service.serving(), AsyncBatonClient(f"127.0.0.1:{service.port}", retry=ONCE) as baton:
        caller, began_s = Caller(baton, setup, timeline), time.monotonic()

        async def look() -> None:
            while True:
                timeline.decode_workers.append((time.monotonic() - began_s, await service.decode_workers()))
                await asyncio.sleep(0.5)

        looking = asyncio.create_task(look())
        async with asyncio.TaskGroup() as tasks:
            await caller.poisson(LONG_PROMPTS, prompts_per_s, setup.seconds, tasks)
            await caller.poisson(LONG_ANSWERS, answers_per_s, 3 * setup.seconds, tasks)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    return timeline


def figures_of(timeline: Timeline, setup: Setup) -> dict[str, object]:
    """Of the last half of the second phase, when whatever was to change has changed."""
    begin_s, end_s = 2.5 * setup.seconds, 4 * setup.seconds
    late = [call for call in timeline.calls if begin_s <= call.sent_s < end_s]
    answered = [call for call in timeline.calls if call.result == "answered" and begin_s <= call.ended_s < end_s]
    return {
        "goodput_per_s": round(len(answered) / (end_s - begin_s), 2),
        "offered_per_s": round(len(late) / (end_s - begin_s), 2),
        "ttft_p50_ms": round(_median([call.ttft_ms for call in late]) or 0.0, 1),
        "tbt_p50_ms": round(_median([call.tbt_ms for call in late]) or 0.0, 2),
        "decode_workers": timeline.decode_workers[-1][1] if timeline.decode_workers else 0,
        "changed_after_s": next(
            (round(at - setup.seconds, 1) for at, count in timeline.decode_workers if count > 1), None
        ),
        "failed": sum(call.result == "failed" for call in timeline.calls),
        "results": {
            name: sum(call.result == name for call in late) for name in ("answered", "late", "refused", "failed")
        },
    }


def pictures(timelines: Sequence[Timeline]) -> dict[str, str]:
    time_axis = Axis("seconds; long prompts first, then long answers")
    names = {"off": "roles stay", "act": "planner changes them"}

    def chart(title: str, axis: str, points: Callable[[Timeline], list[tuple[float, float]]]) -> str:
        curves = tuple(Curve(names[each.planner], tuple(points(each))) for each in timelines)
        return draw_lines(LineChart(title, time_axis, Axis(axis), curves))

    return {
        "goodput": chart("Answers in time", "answers per second", lambda timeline: timeline.goodput),
        "ttft": chart("Time to the first token, median", "milliseconds", lambda timeline: timeline.ttft),
        "tbt": chart("Time between tokens, median", "milliseconds", lambda timeline: timeline.tbt),
    }


async def compare(setup: Setup) -> tuple[dict[str, object], list[Timeline]]:
    with tempfile.TemporaryDirectory(prefix="baton-role-change-") as scratch:
        folder = Path(scratch)
        write_tiny_checkpoint(folder / "tiny")
        timelines = []
        for planner in ("off", "act"):
            timelines.append(await run(folder, setup, planner, *rates(setup)))
            print(planner, figures_of(timelines[-1], setup), file=sys.stderr, flush=True)
    return {timeline.planner: figures_of(timeline, setup) for timeline in timelines}, timelines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of the first phase; the second is three times that"
    )
    parser.add_argument("--slots", type=int, default=8, help="sequences that a decode worker runs at once")
    parser.add_argument("--deadline", type=float, default=4.0, help="of each call, in seconds")
    parser.add_argument("--folder", type=Path, help="where role_change.json and the pictures are written")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    setup = Setup(options.seconds, options.slots, options.deadline)
    result, timelines = asyncio.run(compare(setup))
    whole = {"machine": describe_machine(), "setup": asdict(setup), **result}
    print(json.dumps(whole, indent=None if options.json else 2))
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        (options.folder / "role_change.json").write_text(json.dumps(whole, indent=2) + "\n")
        for name, picture in pictures(timelines).items():
            (options.folder / f"{name}.svg").write_text(picture)


if __name__ == "__main__":
    main()
