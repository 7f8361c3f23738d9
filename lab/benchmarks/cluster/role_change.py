"""The load shifts from long prompts to long answers, on two prefill workers and one decode worker: with roles that
stay as they were, and with a planner that may change them.

    python -m baton.lab.benchmarks.cluster.role_change [--seconds 30] [--folder docs/role_change] [--json FILE]

Real processes: router and workers that can change their roles, whose steps take as long as on a device of their own
(paced_worker.py), so that two cores suffice. Calls come at random (Poisson): for a while long prompts with
short answers, a fifth more than one prefill worker can do; then short prompts with long answers, half as many again as
one decode worker can do. Every call has a deadline; goodput counts the answers that were complete by then, over time.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from baton.lab.benchmarks.serve.load import Job, RequestOutcome, ServiceLoad, random_arrivals_s, random_tokens, tpot_s
from baton.lab.benchmarks.serve.targets import BatonTarget
from baton.lab.harness.processes import HarnessWorker, RunningCluster, router_and_workers, tiny_model
from baton.lab.report.picture import Axis, DrawnCurve, LineChart, draw_lines
from baton.lab.report.result import read_arguments, write_pictures, write_result
from baton.launch.tiny_checkpoint import VOCABULARY

BUCKET_S, LOOK_S = 2.0, 0.5
PROMPTS_OVER, ANSWERS_OVER = 1.2, 1.5
"""Load of either kind, as a multiple of what one worker of the role can do."""
FEWEST_TOKENS = 16  # of an answer whose time between tokens counts
STEP_MS, TOKEN_MS = 8.0, 0.25


@dataclass(frozen=True, slots=True)
class CallKind:
    prompt_tokens: int
    answer_tokens: int


LONG_PROMPTS, LONG_ANSWERS = CallKind(480, 4), CallKind(32, 160)


@dataclass(frozen=True, slots=True)
class RoleChangeSetup:
    seconds: float  # of each phase; the second takes three times as long
    slots: int
    deadline_s: float


@dataclass
class LoadTimeline:
    """Counts of one run, in buckets of BUCKET_S."""

    planner: str
    calls: tuple[RequestOutcome, ...] = ()
    decode_workers: list[tuple[float, int]] = field(default_factory=list)  # at each look

    def points(
        self, value: Callable[[list[RequestOutcome]], float | None], at: Callable[[RequestOutcome], float]
    ) -> list[tuple[float, float]]:
        end_s = max((call.ended_s for call in self.calls), default=0.0)
        found = []
        for bucket in range(int(end_s / BUCKET_S)):
            here = [call for call in self.calls if bucket * BUCKET_S <= at(call) < (bucket + 1) * BUCKET_S]
            measured = value(here)
            if measured is not None:
                found.append(((bucket + 0.5) * BUCKET_S, measured))
        return found


def answered_per_s(calls: Sequence[RequestOutcome]) -> float:
    """Return the rate of calls that ended within one bucket."""
    return sum(call.result == "answered" for call in calls) / BUCKET_S


def median_ttft_ms(calls: Sequence[RequestOutcome]) -> float | None:
    known = [call.ttft_s * 1e3 for call in calls if call.pieces_s]
    return median(known) if known else None


def median_tbt_ms(calls: Sequence[RequestOutcome]) -> float | None:
    """Return the median over answers of the mean time between tokens."""
    known = [tpot_s(call) * 1e3 for call in calls if call.output_tokens > FEWEST_TOKENS]
    return median(known) if known else None


def paced_workers(folder: Path, slots: int) -> Iterator[HarnessWorker]:
    """2P+1D that can change their roles."""
    pace = ("--decode-step-ms", STEP_MS, "--prefill-token-ms", TOKEN_MS, "--max-sequences", slots)
    model = ("--model", folder / "tiny", "--kv-memory", "64MiB")
    for name in ("prefill-0", "prefill-1", "decode-0"):
        role = ("--role", name.partition("-")[0])
        yield HarnessWorker(name, "baton.lab.benchmarks.cluster.paced_worker", (*role, *pace, *model))


async def decode_workers(cluster: RunningCluster) -> int:
    """Return the number of decode workers that serve now."""
    status = await cluster.status()
    workers = status.workers if status is not None else ()
    serving = [each for each in workers if each.connected and each.load and not each.load.draining]
    return sum(each.role == "decode" for each in serving)


def jobs(setup: RoleChangeSetup, prompts_per_s: float, answers_per_s: float) -> Iterator[Job]:
    """Long prompts, and then three times as long long answers."""
    chance, turn_s = random.Random(5), setup.seconds
    for kind, per_s, begin_s, end_s in (
        (LONG_PROMPTS, prompts_per_s, 0.0, turn_s),
        (LONG_ANSWERS, answers_per_s, turn_s, 4 * turn_s),
    ):
        for at_s in random_arrivals_s(chance, per_s, begin_s, end_s):
            yield Job(random_tokens(chance, kind.prompt_tokens, VOCABULARY), kind.answer_tokens, at_s)


def rates(setup: RoleChangeSetup) -> tuple[float, float]:
    """Calls a second of the first and of the second phase."""
    prompts_per_s = 1e3 / (LONG_PROMPTS.prompt_tokens * TOKEN_MS)
    answers_per_s = setup.slots * 1e3 / (LONG_ANSWERS.answer_tokens * STEP_MS)
    return PROMPTS_OVER * prompts_per_s, ANSWERS_OVER * answers_per_s


async def run(
    folder: Path, setup: RoleChangeSetup, planner: str, prompts_per_s: float, answers_per_s: float
) -> LoadTimeline:
    timeline = LoadTimeline(planner)
    planning = ("--planner", planner, "--planner-hold-s", 2, "--planner-cool-down-s", 15)
    slos = ("--planner-ttft-ms", 1000, "--planner-tbt-ms", 100)
    workers = tuple(paced_workers(folder, setup.slots))
    async with router_and_workers(folder, workers, (*slos, *planning), prefix=f"{planner}-") as cluster:
        target, began_s = BatonTarget(cluster.target, timeout_s=setup.deadline_s), time.monotonic()

        async def look() -> None:
            while True:
                timeline.decode_workers.append((time.monotonic() - began_s, await decode_workers(cluster)))
                await asyncio.sleep(LOOK_S)

        looking = asyncio.create_task(look())
        timeline.calls = (
            await ServiceLoad(target.answer).open_loop(jobs(setup, prompts_per_s, answers_per_s))
        ).outcomes
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await target.close()
    return timeline


def figures_of(timeline: LoadTimeline, setup: RoleChangeSetup) -> dict[str, object]:
    """Return figures of the last half of the second phase, when all role changes are done."""
    begin_s, end_s = 2.5 * setup.seconds, 4 * setup.seconds
    late = [call for call in timeline.calls if begin_s <= call.sent_s < end_s]
    answered = [call for call in timeline.calls if call.result == "answered" and begin_s <= call.ended_s < end_s]
    return {
        "goodput_per_s": round(len(answered) / (end_s - begin_s), 2),
        "offered_per_s": round(len(late) / (end_s - begin_s), 2),
        "ttft_p50_ms": round(median_ttft_ms(late) or 0.0, 1),
        "tbt_p50_ms": round(median_tbt_ms(late) or 0.0, 2),
        "decode_workers": timeline.decode_workers[-1][1] if timeline.decode_workers else 0,
        "changed_after_s": next(
            (round(at - setup.seconds, 1) for at, count in timeline.decode_workers if count > 1), None
        ),
        "failed": sum(call.result == "failed" for call in timeline.calls),
        "results": {
            name: sum(call.result == name for call in late) for name in ("answered", "late", "refused", "failed")
        },
    }


def pictures(timelines: Sequence[LoadTimeline]) -> dict[str, str]:
    time_axis = Axis("seconds; long prompts first, then long answers")
    names = {"off": "roles stay", "act": "planner changes them"}

    def chart(title: str, axis: str, value: Callable[[list[RequestOutcome]], float | None], at: str = "sent_s") -> str:
        points = (each.points(value, lambda call: float(getattr(call, at))) for each in timelines)
        curves = (DrawnCurve(names[each.planner], tuple(of)) for each, of in zip(timelines, points, strict=True))
        return draw_lines(LineChart(title, time_axis, Axis(axis), tuple(curves)))

    return {
        "goodput": chart("Answers in time", "answers per second", answered_per_s, at="ended_s"),
        "ttft": chart("Time to the first token, median", "milliseconds", median_ttft_ms),
        "tbt": chart("Time between tokens, median", "milliseconds", median_tbt_ms),
    }


async def compare(setup: RoleChangeSetup) -> tuple[dict[str, object], list[LoadTimeline]]:
    with tiny_model() as folder:
        timelines = []
        for planner in ("off", "act"):
            timelines.append(await run(folder, setup, planner, *rates(setup)))
            print(planner, figures_of(timelines[-1], setup), file=sys.stderr, flush=True)
    return {timeline.planner: figures_of(timeline, setup) for timeline in timelines}, timelines


def main() -> None:
    options = read_arguments(
        __doc__,
        seconds=(10.0, "of the first phase; the second is three times that"),
        slots=(8, "sequences that a decode worker runs at once"),
        deadline=(4.0, "of each call, in seconds"),
        folder=(None, "where role_change.json and the pictures are written"),
    )
    setup = RoleChangeSetup(options.seconds, options.slots, options.deadline)
    result, timelines = asyncio.run(compare(setup))
    print(json.dumps(result, indent=2))
    whole = {"setup": asdict(setup), **result}
    write_result(options.json, whole)
    write_pictures(options.folder, pictures(timelines))
    if options.folder is not None:
        write_result(options.folder / "role_change.json", whole)


if __name__ == "__main__":
    main()
