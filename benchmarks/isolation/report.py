"""The results of `baton bench isolation`: a table, JSON, a picture. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from baton.benchmarks.isolation.figures import Figures, Objectives, Verdict, judge, medians
from baton.benchmarks.isolation.load import Load, Phase
from baton.benchmarks.report.picture import Axis, BarChart, Bars, draw_bars
from baton.benchmarks.report.result import Columns, table
from baton.benchmarks.report.statistics import Estimate

Rounds = Mapping[str, Mapping[Phase, Sequence[Figures]]]  # by variant


@dataclass(frozen=True, slots=True)
class Report:
    model: str
    quantize: str
    cores: tuple[int, ...]
    load: Load
    objectives: Objectives
    rounds: Rounds


def as_table(report: Report) -> str:
    """Medians over rounds. Times between tokens: p50, p99, longest, mean of the worst 10 %, in milliseconds."""
    measured = [
        (f"{variant} {phase}", medians(rounds))
        for variant, phases in report.rounds.items()
        for phase, rounds in phases.items()
        if rounds
    ]
    lines = [table(measured, COLUMNS)]
    for variant, phases in report.rounds.items():
        if (verdict := judge(phases)) is not None:
            lines.append(_verdict_line(variant, phases, verdict))
    count = max((len(rounds) for phases in report.rounds.values() for rounds in phases.values()), default=0)
    load = report.load
    lines.append(
        f"{report.model} (weights: {report.quantize}), {load.answers} answers, prompts of {load.prompt_tokens} tokens: "
        f"{load.prompts_per_s:g}/s when paced, {load.prompts_in_flight} in flight when saturated; "
        f"{count} rounds of {load.seconds:g} s; in time: TBT {report.objectives.tbt_ms:g} ms, "
        f"TTFT {report.objectives.ttft_ms:g} ms"
    )
    lines.append(f"{_cores_line(report.cores)}; w10%: mean of the worst 10 %")
    return "\n".join(lines)


def as_json(report: Report) -> dict[str, Any]:
    """Every round, their medians, and the verdicts: of the client's times, which are judged, and of the steps."""
    variants = {}
    for variant, phases in report.rounds.items():
        verdicts = {"client": judge(phases), "steps": judge(phases, of_steps=True)}
        variants[variant] = {
            "phases": {
                phase: {"median": asdict(medians(rounds)), "rounds": [asdict(each) for each in rounds]}
                for phase, rounds in phases.items()
                if rounds
            },
            "verdicts": {name: _verdict(verdict) for name, verdict in verdicts.items() if verdict is not None},
        }
    return {
        "model": report.model,
        "quantize": report.quantize,
        "cores": list(report.cores),
        "load": asdict(report.load),
        "objectives": asdict(report.objectives),
        "variants": variants,
    }


def as_picture(report: Report) -> str:
    """p99 of the time between tokens as the client sees it; whiskers span the rounds."""
    phases = [phase for phase in Phase if any(rounds.get(phase) for rounds in report.rounds.values())]
    series = tuple(
        Bars(variant, tuple(_bar(rounds.get(phase, ())) for phase in phases))
        for variant, rounds in report.rounds.items()
    )
    title = f"Time between tokens of {report.load.answers} answers beside prompts of {report.load.prompt_tokens} tokens"
    return draw_bars(BarChart(title, Axis("p99, ms", is_log=True), tuple(map(str, phases)), series))


def _bar(rounds: Sequence[Figures]) -> Estimate | None:
    p99s = [each.tbt.p99 for each in rounds]
    return Estimate(medians(rounds).tbt.p99, min(p99s), max(p99s)) if p99s else None


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


COLUMNS: Columns[tuple[str, Figures]] = {
    "": lambda row: row[0],
    "TBT p50 ms": lambda row: _number(row[1].tbt.p50, 1),
    "TBT p99": lambda row: _number(row[1].tbt.p99, 1),
    "TBT max": lambda row: _number(row[1].tbt.max, 1),
    "TBT w10%": lambda row: _number(row[1].tbt.worst10, 1),
    "step p99": lambda row: _number(row[1].step.p99 if row[1].step else None, 1),
    "step max": lambda row: _number(row[1].step.max if row[1].step else None, 1),
    "step w10%": lambda row: _number(row[1].step.worst10 if row[1].step else None, 1),
    "TTFT answer": lambda row: _number(row[1].answer_ttft.p50 if row[1].answer_ttft else None, 0),
    "TTFT prompt": lambda row: _number(row[1].prompt_ttft.p50 if row[1].prompt_ttft else None, 0),
    "tokens/s": lambda row: _number(row[1].answer_tokens_per_s, 1),
    "in time": lambda row: _number(row[1].answer_goodput_per_s, 1),
    "prompts/s": lambda row: _number(row[1].prompts_per_s, 2),
    "prompts in time": lambda row: _number(row[1].prompt_goodput_per_s, 2),
    "engine runs ms": lambda row: _number(row[1].engine_cpu_ms, 2),
    "engine waits": lambda row: _number(row[1].engine_wait_ms, 3),
}


def _verdict_line(variant: str, phases: Mapping[Phase, Sequence[Figures]], verdict: Verdict) -> str:
    """At the client, and at the decode worker where that was measured."""
    of_steps = judge(phases, of_steps=True) if any(each.step for each in phases[Phase.QUIET]) else None
    parts = []
    for place, judged in (("client", verdict), ("steps", of_steps)):
        if judged is not None:
            floor = "" if judged.floor_ratio is None else f", floor {judged.floor_ratio:.3f}"
            parts.append(f"{place} {judged.p99_ratio:.3f} (at most {judged.allowed:.3f}{floor})")
    floor = "" if verdict.floor_throughput_ratio is None else f" (floor {verdict.floor_throughput_ratio:.3f})"
    parts.append(f"throughput {verdict.throughput_ratio:.3f}{floor}")
    return f"{variant}: p99 saturated over quiet: {'; '.join(parts)}: {'held' if verdict.holds else 'missed'}"


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {**asdict(verdict), "holds": verdict.holds}


def _cores_line(cores: Sequence[int]) -> str:
    own, shared = cores[0], cores[-1]
    return (
        f"decode on core {own}; router, Redis, prefill and client on core {shared}; colocated and vLLM compute on both"
    )
