"""What becomes of a service that is asked for more than it can do, and of a quiet caller beside a noisy one.

    .venv/bin/python -m baton.lab.benchmarks.cluster.overload [--seconds 15] [--json FILE]
                                               [--picture docs/performance/overload.svg]

One prefill worker, one decode worker of few slots and a router, on a tiny model, all real processes. First the
capacity: answers a second with twice as many calls at once as there are slots. Then calls come at random (Poisson) at
multiples of it, however many are unanswered. Each has a deadline; goodput counts the answers that were complete by
then. Last, a noisy caller at ten times the capacity and a quiet one at a fifth of it, each with an API key of its own,
and the quiet one by itself.
"""

import asyncio
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import repeat

from baton.lab.benchmarks.processes import Cluster, Worker, router_and_workers, tiny_model
from baton.lab.benchmarks.report.picture import Axis, Curve, LineChart, draw_lines
from baton.lab.benchmarks.report.result import read_arguments, write_pictures, write_result
from baton.lab.benchmarks.report.statistics import percentile
from baton.lab.benchmarks.serve.load import Job, Load, Outcome, random_arrivals_s, random_tokens
from baton.lab.benchmarks.serve.targets import BatonTarget
from baton.launch import CommandFailed
from baton.launch.tiny_checkpoint import VOCABULARY

MULTIPLES = (0.5, 1.0, 2.0, 5.0, 10.0)
NOISY, QUIET = 10.0, 0.2


@dataclass(frozen=True, slots=True)
class Setup:
    slots: int
    prompt_tokens: int
    answer_tokens: int
    deadline_s: float
    seconds: float  # of each measurement


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
    refusal_p95_ms: float  # how long a refusal took
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


def jobs(setup: Setup, chance: random.Random, arrivals_s: Iterable[float]) -> Iterator[Job]:
    """No two prompts are alike."""
    for at_s in arrivals_s:
        yield Job(random_tokens(chance, setup.prompt_tokens, VOCABULARY), setup.answer_tokens, at_s)


@asynccontextmanager
async def caller(cluster: Cluster, setup: Setup, api_key: str) -> AsyncIterator[Load]:
    target = BatonTarget(cluster.target, timeout_s=setup.deadline_s, api_key=api_key)
    try:
        yield Load(target.answer)
    finally:
        await target.close()


async def measure(cluster: Cluster, setup: Setup, capacity_per_s: float, multiples: dict[str, float]) -> list[Measured]:
    """Callers at once, by API key, at these multiples of the capacity."""

    async def call(seed: int, api_key: str, multiple: float) -> Measured:
        chance = random.Random(seed)
        arrivals_s = random_arrivals_s(chance, multiple * capacity_per_s, 0.0, setup.seconds)
        async with caller(cluster, setup, api_key) as load:
            run = await load.open_loop(jobs(setup, chance, arrivals_s))
        return summarise(run.outcomes, multiple, setup)

    return await asyncio.gather(*(call(seed, *each) for seed, each in enumerate(multiples.items())))


async def measure_capacity(cluster: Cluster, setup: Setup) -> float:
    """Of two rounds the second: the first warms everything up."""
    async with caller(cluster, setup, "capacity") as load:
        for seed in (98, 99):
            endless = jobs(setup, random.Random(seed), repeat(0.0))
            run = await load.closed_loop(endless, 2 * setup.slots, setup.seconds)
    return summarise(run.outcomes, 1.0, setup).goodput_per_s


def summarise(calls: Sequence[Outcome], multiple: float, setup: Setup) -> Measured:
    """Goodput over the time from the first moment at which the queue may be full to the end of the arrivals.

    Raises: CommandFailed where a call failed, and was neither refused nor late.
    """
    if failed := next((call.error for call in calls if call.result == "failed"), ""):
        raise CommandFailed(f"a call failed: {failed}")
    results = Counter(call.result for call in calls)
    warm_s = min(setup.deadline_s, setup.seconds / 3)
    good = [call for call in calls if call.result == "answered" and warm_s <= call.ended_s <= setup.seconds]
    ttfts = [1e3 * call.ttft_s for call in calls if call.pieces_s]
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
    with tiny_model() as folder:
        quiet = ("--log-level", "warning")
        model = ("--model", folder / "tiny", "--kv-memory", "64MiB", *quiet)
        workers = (
            Worker("prefill-0", "baton.prefill_worker", model),
            Worker("decode-0", "baton.decode_worker", (*model, "--max-sequences", setup.slots)),
        )
        async with router_and_workers(folder, workers, quiet) as cluster:
            capacity_per_s = await measure_capacity(cluster, setup)
            print(f"capacity: {capacity_per_s:.2f} answers/s", file=sys.stderr)
            load = []
            for multiple in MULTIPLES:
                load += await measure(cluster, setup, capacity_per_s, {"one": multiple})
                print(as_line(load[-1]), file=sys.stderr)
            [alone] = await measure(cluster, setup, capacity_per_s, {"quiet": QUIET})
            beside, noisy = await measure(cluster, setup, capacity_per_s, {"quiet": QUIET, "noisy": NOISY})
    return Report(setup, capacity_per_s, tuple(load), alone, beside, noisy)


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
    options = read_arguments(
        __doc__,
        seconds=(15.0, "of each measurement"),
        slots=(4, "sequences that the decode worker runs at once"),
        prompt_tokens=64,
        answer_tokens=192,
        deadline=(4.0, "of each call, in seconds"),
        picture=(None, "an SVG"),
    )
    setup = Setup(options.slots, options.prompt_tokens, options.answer_tokens, options.deadline, options.seconds)
    report = asyncio.run(measure_all(setup))
    print("\n".join(as_lines(report)))
    write_result(options.json, {"kept": report.kept, **asdict(report)})
    if options.picture is not None:
        write_pictures(options.picture.parent, {options.picture.stem: as_picture(report)})


if __name__ == "__main__":
    main()
