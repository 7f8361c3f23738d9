"""Roles and replicas of a simulated cluster under shifting loads: how soon they follow, and whether they oscillate.

    .venv/bin/python -m baton.lab.planning.planner [--loads "square wave" ...] [--seeds 5] [--jobs 2]
                                     [--traces FILE ... --speed 0.5 --requests 4000] [--json FILE] [--pictures FOLDER]

Router, planner, workers and drains are the real code in virtual time (`lab/planning/`). Each load runs with each seed
with fixed roles and with `--planner act`; a growing load with fixed numbers of workers and with the autoscalers of
`deploy/kubernetes`. Workers die and return meanwhile. "undone": changes of a role that the next change reverses within
two minutes, or a number of replicas that turns more than once. `--traces`: traces of Mooncake's or Azure's format, one
after the other, instead of the loads.
"""

import multiprocessing
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from baton.lab.planning.autoscaler import read_autoscaler
from baton.lab.planning.loads import (
    FAST,
    FLAGS,
    GROWING,
    LOADS,
    OVERHEADS,
    SHAPE,
    SLOW,
    TARGETS,
    WorkerSpeed,
    workers_needed,
)
from baton.lab.planning.operation import OperationRecord, OperationSetting, followed_s, operate, reversals, turns
from baton.lab.report.picture import Axis, DrawnCurve, LineChart, draw_lines
from baton.lab.report.result import (
    Columns,
    judge_rounds,
    make_result,
    read_arguments,
    table,
    write_pictures,
    write_result,
)
from baton.lab.simulation.campaign import HASH_SEED
from baton.lab.sizing.cluster import ClusterShape, SizingCall
from baton.lab.sizing.loads import busiest
from baton.lab.sizing.trials import SizingTargets, figures_of
from baton.launch.paths import ROOT
from baton.process.registry.worker_record import WorkerRole

MANIFEST = ROOT / "deploy" / "kubernetes" / "components" / "autoscaling" / "autoscalers.yaml"
MEASURES = ("router/placement/planner.py", "router/placement/replicas.py", "router/roles.py", "lab/planning")
DEATHS_PER_H = 12.0
UNDONE_S = 120.0
TRACE_TTFT_MS = 30_000.0  # of prompts of tens of thousands of tokens
FIXED, ROLES, REPLICAS = "fixed", "planner", "autoscalers"


@dataclass(frozen=True, slots=True)
class PlannerCase:
    load: str
    mode: str
    seed: int
    traces: tuple[Path, ...] = ()
    speed: float = 1.0
    requests: int = sys.maxsize

    @property
    def workers(self) -> WorkerSpeed:
        return FAST if self.traces else SLOW

    @property
    def calls(self) -> tuple[SizingCall, ...]:
        if not self.traces:
            return (GROWING if self.load == "growing" else LOADS[self.load]).draw(self.seed)
        calls, began_s = list[SizingCall](), 0.0
        for trace in self.traces:
            calls += (
                replace(each, at_s=each.at_s + began_s) for each in busiest(trace, 1, self.requests, self.speed)[0]
            )
            began_s = calls[-1].at_s
        return tuple(calls)


@dataclass(frozen=True, slots=True)
class PlannerRound:
    load: str
    mode: str
    seed: int
    share: float  # fraction of requests within both SLOs
    failed: int
    deaths: int
    changes: int  # of roles, or of the number of replicas
    undone: int
    followed_s: tuple[float, ...]  # time from each shift to the first change of a role


def run_case(case: PlannerCase) -> tuple[PlannerRound, OperationRecord]:
    calls = case.calls
    shape, targets, flags = _setting(case, calls)
    scales = case.load == "growing"
    specs = {role: read_autoscaler(MANIFEST, f"baton-{role}") for role in WorkerRole} if case.mode == REPLICAS else {}
    setting = OperationSetting(flags, specs, DEATHS_PER_H)
    record = operate(shape, case.workers.costs, OVERHEADS, setting, case.seed, calls)
    figures = figures_of(record.answers, targets)
    replicas = [[each.replicas[role] for each in record.samples] for role in WorkerRole]
    changes = sum(map(_changes, replicas)) if scales else len(record.changes)
    undone = sum(max(0, turns(each) - 1) for each in replicas) if scales else reversals(record.changes, UNDONE_S)
    shifts = () if scales or case.traces else LOADS[case.load].shifts
    followed = tuple(followed_s(record.changes, *shift) for shift in shifts) if case.mode == ROLES else ()
    return PlannerRound(
        case.load,
        case.mode,
        case.seed,
        figures.share,
        figures.failed,
        len(record.deaths_s),
        changes,
        undone,
        followed,
    ), record


def _setting(case: PlannerCase, calls: Sequence[SizingCall]) -> tuple[ClusterShape, SizingTargets, tuple[str, ...]]:
    """Return cluster, SLOs and flags of the router."""
    planner = ("--planner", "act" if case.mode == ROLES else "propose")
    if case.load == "growing":
        return replace(SHAPE, prefill=2, decode=2, spare=6), TARGETS, (*FLAGS, *planner)
    shape = replace(SHAPE, elastic=True)
    if not case.traces:
        return shape, TARGETS, (*FLAGS, *planner)
    longest = max(len(each.prompt) + each.answer_tokens for each in calls)
    flags = ("--ttft-slo-ms", str(TRACE_TTFT_MS), "--tbt-slo-ms", str(TARGETS.tbt_ms), *planner)
    kept = max(SHAPE.kv_tokens, 3 * longest)
    shape = replace(shape, context_tokens=longest + 1, kv_tokens=kept, max_sequences=FAST.batch)
    return shape, replace(TARGETS, ttft_ms=TRACE_TTFT_MS), flags


def _changes(numbers: Sequence[int]) -> int:
    return sum(a != b for a, b in pairwise(numbers))


COLUMNS: Columns[list[PlannerRound]] = {
    "load": lambda rounds: rounds[0].load,
    "mode": lambda rounds: rounds[0].mode,
    "in SLO": lambda rounds: _range([100 * each.share for each in rounds], "%"),
    "failed": lambda rounds: sum(each.failed for each in rounds),
    "deaths": lambda rounds: sum(each.deaths for each in rounds),
    "changes": lambda rounds: _range([each.changes for each in rounds]),
    "undone": lambda rounds: sum(each.undone for each in rounds),
    "followed after": lambda rounds: _range([each for one in rounds for each in one.followed_s], " s"),
}


def _range(values: Sequence[float], unit: str = "") -> str:
    """Format the median of values with their range."""
    if not values:
        return ""
    return f"{median(values):.0f} [{min(values):.0f}..{max(values):.0f}]{unit}"


def picture(case: PlannerCase, record: OperationRecord) -> str:
    """Draw the workers of each role over time, and the workers that the load keeps busy."""
    curves = []
    for role in WorkerRole:
        counts = [
            (each.at_s, each.replicas[role] if case.mode == REPLICAS else each.serving[role]) for each in record.samples
        ]
        needed = tuple((at_s / 60, workers) for at_s, workers in workers_needed(case.calls, role, case.workers))
        curves += [DrawnCurve(f"{role} workers", _steps(counts)), DrawnCurve(f"{role} load", needed, is_dashed=True)]
    title = f"{case.load}: workers of each role ({case.mode})"
    return draw_lines(LineChart(title, Axis("minutes"), Axis("workers"), tuple(curves)))


def _steps(counts: Sequence[tuple[float, int]]) -> tuple[tuple[float, float], ...]:
    """Return the corners of a number over time."""
    corners = [counts[0]]
    for (_, before), (at_s, number) in pairwise(counts):
        if number != before:
            corners += [(at_s, before), (at_s, number)]
    return tuple((at_s / 60, float(number)) for at_s, number in [*corners, counts[-1]])


def cases_of(
    loads: Sequence[str], seeds: int, traces: Sequence[Path], speed: float, requests: int
) -> list[PlannerCase]:
    if traces:
        names, files = [" then ".join(each.stem for each in traces)], tuple(traces)
    else:
        names, files = list(loads), ()
    return [
        PlannerCase(name, mode, seed, files, speed, requests)
        for name in names
        for mode in (FIXED, REPLICAS if name == "growing" else ROLES)
        for seed in range(seeds)
    ]


def main() -> int:
    options = read_arguments(
        __doc__,
        loads=[*LOADS, "growing"],
        seeds=(3, "number of seeds"),
        jobs=(2, "number of processes"),
        traces=list[str](),
        speed=(1.0, "factor of the traces' rate"),
        requests=(sys.maxsize, "number of a trace's requests: the stretch with the most tokens per second"),
        pictures=(None, "folder for the charts"),
    )
    cases = cases_of(
        options.loads, options.seeds, [Path(each) for each in options.traces], options.speed, options.requests
    )
    os.environ["PYTHONHASHSEED"] = HASH_SEED
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=1) as pool:
        runs = pool.map(run_case, cases, chunksize=1)
    rows = {
        (each.load, each.mode): [one for one, _ in runs if (one.load, one.mode) == (each.load, each.mode)]
        for each, _ in runs
    }
    print(table(list(rows.values()), COLUMNS))
    drawn = [
        (case, record) for case, (_, record) in zip(cases, runs, strict=True) if case.seed == 0 and case.mode != FIXED
    ]
    write_pictures(
        options.pictures,
        {case.load.replace(" ", "-").replace(",", ""): picture(case, record) for case, record in drawn},
    )
    verdict = judge_rounds("No change of a role or of replicas is undone.", (not each.undone for each, _ in runs))
    write_result(options.json, make_result(MEASURES, [asdict(each) for each, _ in runs], verdict))
    return 0 if not verdict.missed else 1


if __name__ == "__main__":
    sys.exit(main())
