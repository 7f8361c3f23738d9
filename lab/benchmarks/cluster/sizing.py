"""Predicted and measured TTFT and TBT, setting by setting: `baton size` against real processes.

    .venv/bin/python -m baton.lab.benchmarks.cluster.sizing [--seconds 25] [--model FOLDER --curves curves.json]
                                     [--overheads FILE] [--json FILE] [--picture docs/sizing/predicted.svg]

First the overheads are measured on an idle 1P+1D: what is between two steps, of a message, of a copy of KV. Then every
setting is predicted, all predictions are printed, and only then it is measured: the same calls at the same times on
router and workers as real processes. Workers are paced (paced_worker.py), so that two cores carry six of them; with
--model and the curves of `baton bench curves --threads 1` for it, 1P+1D also really computes. The full run takes nine
minutes, `--seconds 6 --short` two.
"""

import asyncio
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from baton.lab.benchmarks.processes import Worker, router_and_workers, tiny_model
from baton.lab.benchmarks.report.picture import Axis, BarChart, Bars, draw_bars
from baton.lab.benchmarks.report.result import Columns, read_arguments, table, write_pictures, write_result
from baton.lab.benchmarks.serve.load import Job, Load, Outcome, random_arrivals_s
from baton.lab.benchmarks.serve.targets import BatonTarget
from baton.lab.sizing.cluster import Answered, Call, ClusterShape
from baton.lab.sizing.costs import Overheads
from baton.lab.sizing.trials import Crew, Figures, Targets, Trial, crew, figures_of, step_costs
from baton.launch import CommandFailed

STEP_MS, TOKEN_MS = 20.0, 0.6
"""Of paced workers: slow enough that six of them, a router and its client leave a core idle."""
PROMPT_TOKENS, ANSWER_TOKENS, SPREAD = 480, 64, 0.5
SLOTS = 8
CLUSTERS = ((1, 1), (2, 1), (2, 3), (3, 3))
LOADS = (0.3, 0.6, 0.85)
"""Of what the tighter role can do."""
TARGETS = Targets(ttft_ms=2000.0, tbt_ms=100.0)
SEEDS = 3
PROBES = 12
VOCABULARY = 250  # token ids of prompts, in real processes above the special ones


@dataclass(frozen=True, slots=True)
class Setting:
    """One cluster under one load."""

    name: str
    cluster: ClusterShape
    load: float
    calls: tuple[Call, ...]
    costs: Mapping[str, Any]
    model: Path | None  # None: paced workers


@dataclass(frozen=True, slots=True)
class Compared:
    setting: str
    load: float
    predicted: Figures
    measured: Figures

    def error(self, name: str) -> float:
        """Of the prediction, as a share of the measured value."""
        measured = float(getattr(self.measured, name))
        return (float(getattr(self.predicted, name)) - measured) / measured if measured else 0.0


def draw_calls(seed: int, per_s: float, seconds: float) -> tuple[Call, ...]:
    """Lengths evenly around their means."""
    chance = random.Random(seed)
    return tuple(
        Call(at_s, bytes(chance.randrange(VOCABULARY) for _ in range(_length(chance, PROMPT_TOKENS))),
             _length(chance, ANSWER_TOKENS))
        for at_s in random_arrivals_s(chance, per_s, 0.0, seconds)
    )  # fmt: skip


def _length(chance: random.Random, mean: int) -> int:
    return chance.randint(round(mean * (1 - SPREAD)), round(mean * (1 + SPREAD)))


def capacity_per_s(shape: ClusterShape, costs: Mapping[str, Any]) -> float:
    """Calls a second of the tighter role."""
    known = step_costs(costs)
    answers = shape.decode * shape.max_sequences / (ANSWER_TOKENS * known.decode_step_s(shape.max_sequences))
    return min(shape.prefill * known.prefill_tokens_per_s / PROMPT_TOKENS, answers)


def settings(seconds: float, short: bool, model: Path | None, curves: Mapping[str, Any] | None) -> Iterator[Setting]:
    paced = {"paced": [STEP_MS / 1e3, TOKEN_MS / 1e3]}
    clusters = CLUSTERS[::3] if short else CLUSTERS
    kinds: list[tuple[str, tuple[int, int], Mapping[str, Any], Path | None]]
    kinds = [("paced", workers, paced, None) for workers in clusters]
    if model is not None and curves is not None:
        kinds.append(("computing", (1, 1), curves, model))
    for kind, (prefill, decode), costs, folder in kinds:
        shape = ClusterShape(prefill, decode, kv_tokens=60_000, context_tokens=2048, max_sequences=SLOTS)
        for load in LOADS[1:2] if short else LOADS:
            calls = draw_calls(round(100 * load) + prefill, load * capacity_per_s(shape, costs), seconds)
            yield Setting(f"{shape}, {kind}", shape, load, calls, costs, folder)


def workers_of(setting: Setting, folder: Path) -> Iterator[Worker]:
    shape = setting.cluster
    slots = ("--max-sequences", shape.max_sequences)
    model = setting.model or folder / "tiny"
    common = ("--model", model, "--model-name", "sized", "--kv-memory", "128MiB" if setting.model is None else "1GiB")
    pace = ("--decode-step-ms", STEP_MS, "--prefill-token-ms", TOKEN_MS)
    for role, count in (("prefill", shape.prefill), ("decode", shape.decode)):
        for number in range(count):
            flags: tuple[object, ...]
            if setting.model is None:
                flags = ("--role", role, *slots, *pace, *common)
                yield Worker(f"{role}-{number}", "baton.lab.benchmarks.cluster.paced_worker", flags)
            else:
                flags = common if role == "prefill" else (*common, *slots)
                yield Worker(f"{role}-{number}", f"baton.{role}_worker", flags)


def jobs_of(calls: Sequence[Call]) -> list[Job]:
    return [Job(tuple(3 + token for token in call.prompt), call.answer_tokens, call.at_s) for call in calls]


def as_answered(outcome: Outcome) -> Answered:
    pieces = [at_s - outcome.sent_s for at_s in outcome.pieces_s]
    return Answered(outcome.sent_s, pieces, outcome.output_tokens, outcome.error)


WARM_UP = 4


async def measure(folder: Path, setting: Setting, one_by_one: bool = False) -> list[Answered]:
    """On real processes. Raises: CommandFailed."""
    quiet = ("--log-level", "warning")
    async with router_and_workers(folder, tuple(workers_of(setting, folder)), quiet) as cluster:
        target = BatonTarget(cluster.target)
        load = Load(target.answer)
        warm_up = draw_calls(7, 4.0, 60.0)[: WARM_UP * sum((setting.cluster.prefill, setting.cluster.decode))]
        await load.closed_loop(jobs_of(warm_up), 4)
        jobs = jobs_of(setting.calls)
        run = await (load.closed_loop(jobs, 1) if one_by_one else load.open_loop(jobs))
        await target.close()
    if failed := next((each.error for each in run.outcomes if each.error), ""):
        raise CommandFailed(f"a call failed: {failed}")
    return [as_answered(each) for each in run.outcomes]


@dataclass(frozen=True, slots=True)
class Idle:
    """Of calls one after another. Medians, milliseconds."""

    ttft_ms: float
    first_gap_ms: float  # between the first two pieces: the hand-over lies there
    gap_ms: float  # between later ones


def idle_of(answers: Sequence[Answered]) -> Idle:
    return Idle(
        1e3 * median(each.ttft_s for each in answers),
        1e3 * median(each.gaps_s[0] for each in answers),
        1e3 * median(gap_s for each in answers for gap_s in each.gaps_s[1:]),
    )


def probes(paced: Mapping[str, Any]) -> Setting:
    """Far apart, so that none waits for another."""
    calls = tuple(replace(call, at_s=2.0 * place) for place, call in enumerate(draw_calls(5, 1.0, 60.0)[:PROBES]))
    shape = ClusterShape(1, 1, kv_tokens=60_000, context_tokens=2048, max_sequences=SLOTS)
    return Setting("idle", shape, 0.0, calls, paced, None)


def fit_overheads(measured: Idle, setting: Setting, nothing: Overheads) -> Overheads:
    """So that the simulation of the same calls is as slow as they were: a step's from later gaps, a message's from
    TTFT, a copy's from the first gap. Each of the three is linear in its own; `nothing`: with all of them at 0.
    """
    from baton.lab.sizing.cluster import run_cluster

    def simulated(overheads: Overheads) -> Idle:
        return idle_of(run_cluster(setting.cluster, step_costs(setting.costs), overheads, setting.calls, 0))

    a_bit_s = 1e-3
    bare = simulated(nothing)
    fitted = replace(nothing, step_s=max(0.0, measured.gap_ms - bare.gap_ms) / 1e3)
    bare, more = simulated(fitted), simulated(replace(fitted, message_s=a_bit_s))
    per_message = (more.ttft_ms - bare.ttft_ms) / (1e3 * a_bit_s)
    fitted = replace(fitted, message_s=max(0.0, measured.ttft_ms - bare.ttft_ms) / 1e3 / per_message)
    bare, more = simulated(fitted), simulated(replace(fitted, copy_s=fitted.copy_s + a_bit_s))
    per_copy = max(0.1, (more.first_gap_ms - bare.first_gap_ms) / (1e3 * a_bit_s))
    return replace(fitted, copy_s=max(0.0, measured.first_gap_ms - bare.first_gap_ms) / 1e3 / per_copy)


def predict(simulations: Crew, setting: Setting, overheads: Overheads) -> Figures:
    """The median of several seeds, figure by figure."""
    runs = simulations.run(
        [Trial(setting.cluster, setting.costs, overheads, setting.calls, TARGETS, seed) for seed in range(SEEDS)]
    )
    return Figures(**{name: median(getattr(run, name) for run in runs) for name in asdict(runs[0])})


COLUMNS: Columns[Compared] = {
    "setting": lambda row: row.setting,
    "load": lambda row: f"{row.load:.0%}",
    "calls": lambda row: row.measured.calls,
    "TTFT p50": lambda row: _pair(row, "ttft_p50_ms"),
    "TTFT p99": lambda row: _pair(row, "ttft_p99_ms"),
    "TBT p50": lambda row: _pair(row, "tbt_p50_ms"),
    "TBT p99": lambda row: _pair(row, "tbt_p99_ms"),
    "errors at p50": lambda row: f"{row.error('ttft_p50_ms'):+.1%} {row.error('tbt_p50_ms'):+.1%}",
}
P50S, P99S = ("ttft_p50_ms", "tbt_p50_ms"), ("ttft_p99_ms", "tbt_p99_ms")


def _pair(row: Compared, name: str) -> str:
    return f"{getattr(row.predicted, name):.1f} / {getattr(row.measured, name):.1f}"


def median_error(rows: Sequence[Compared], names: Sequence[str]) -> float:
    return median(abs(row.error(name)) for row in rows for name in names)


async def compare(
    chosen: Sequence[Setting], overheads: Overheads | None, note: Any
) -> tuple[list[Compared], Overheads, Idle | None]:
    """Raises: CommandFailed."""
    measured: Idle | None = None
    with tiny_model() as folder, crew(2) as simulations:
        if overheads is None:
            probing = probes({"paced": [STEP_MS / 1e3, TOKEN_MS / 1e3]})
            measured = idle_of(await measure(folder, probing, one_by_one=True))
            note(f"idle: {measured}")
            nothing = Overheads(message_s=0.0, step_s=0.0, copy_s=0.0)
            overheads = await asyncio.to_thread(fit_overheads, measured, probing, nothing)
        note(f"overheads: {overheads}")
        predictions = []
        for setting in chosen:
            predictions.append(await asyncio.to_thread(predict, simulations, setting, overheads))
            note(f"predicted {setting.name} at {setting.load:.0%}: {predictions[-1]}")
        rows = []
        for setting, predicted in zip(chosen, predictions, strict=True):
            figures = figures_of(await measure(folder, setting), TARGETS)
            rows.append(Compared(setting.name, setting.load, predicted, figures))
            note(f"measured {setting.name} at {setting.load:.0%}: {figures}")
    return rows, overheads, measured


def picture(rows: Sequence[Compared]) -> str:
    groups = tuple(f"{row.setting.partition(',')[0]} {row.load:.0%}" for row in rows)
    series = tuple(
        Bars(name, tuple(getattr(row, name).ttft_p50_ms for row in rows)) for name in ("predicted", "measured")
    )
    return draw_bars(BarChart("TTFT p50, predicted and measured", Axis("milliseconds"), groups, series))


def main() -> None:
    options = read_arguments(
        __doc__,
        seconds=(25.0, "of each setting"),
        short=(False, "two settings at one load"),
        model=(None, "a checkpoint that 1P+1D really computes with"),
        curves=(None, "curves.json of `baton bench curves --threads 1` for that model"),
        overheads=(None, "overheads of an earlier run, as --json has them; default: measured first"),
        picture=(None, "an SVG"),
    )
    if (options.model is None) != (options.curves is None):
        raise SystemExit("--model and --curves go together: the curves are of that model")
    curves = None if options.curves is None else json.loads(options.curves.read_text())
    known = None if options.overheads is None else Overheads(**json.loads(options.overheads.read_text())["overheads"])

    def note(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    chosen = list(settings(options.seconds, options.short, options.model, curves))
    rows, overheads, idle = asyncio.run(compare(chosen, known, note))
    print(table(rows, COLUMNS))
    print(f"predicted / measured, milliseconds; median error at p50 {median_error(rows, P50S):.1%}, ", end="")
    print(f"at p99 {median_error(rows, P99S):.1%}")
    found = {"overheads": asdict(overheads), "idle": None if idle is None else asdict(idle)}
    write_result(options.json, {**found, "rows": [asdict(row) for row in rows]})
    if options.picture is not None:
        write_pictures(options.picture.parent, {options.picture.stem: picture(rows)})


if __name__ == "__main__":
    main()
