"""The results of `baton bench isolation`: a table, JSON, a picture. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from baton.benchmarks.isolation.figures import Figures, Objectives, Spread, Verdict, judge, medians
from baton.benchmarks.isolation.load import Load, Phase
from baton.benchmarks.report.picture import Axis, BarChart, Bars, draw_bars
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
    lines = [
        f"{'':22}{'TBT at the client, ms':>27}  {'steps of decode, ms':>20}  {'TTFT p50, ms':>14}"
        f"  {'answers, tokens/s':>18}  {'prompts/s':>12}  {'engine, ms/step':>15}",
        f"{'':22}{'p50':>6}{'p99':>7}{'max':>7}{'w10%':>7}  {'p99':>6}{'max':>7}{'w10%':>7}  {'answer':>7}{'prompt':>7}"
        f"  {'all':>9}{'in time':>9}  {'all':>5}{'in time':>7}  {'runs':>7}{'waits':>8}",
    ]
    for variant, phases in report.rounds.items():
        for phase, rounds in phases.items():
            if rounds:
                lines.append(f"{variant:11}{phase:11}" + _row(medians(rounds)))
    lines += [_verdict_line(variant, phases) for variant, phases in report.rounds.items() if judge(phases)]
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


def _row(figures: Figures) -> str:
    tbt, step = figures.tbt, figures.step
    steps = f"{step.p99:6.1f}{step.max:7.1f}{step.worst10:7.1f}" if step else f"{'-':>6}{'-':>7}{'-':>7}"
    engine = f"{_number(figures.engine_cpu_ms, 7, 2)}{_number(figures.engine_wait_ms, 8, 3)}"
    return (
        f"{tbt.p50:6.1f}{tbt.p99:7.1f}{tbt.max:7.1f}{tbt.worst10:7.1f}  {steps}  "
        f"{_ttft(figures.answer_ttft)}{_ttft(figures.prompt_ttft)}  "
        f"{figures.answer_tokens_per_s:9.1f}{figures.answer_goodput_per_s:9.1f}  "
        f"{figures.prompts_per_s:5.2f}{figures.prompt_goodput_per_s:7.2f}  {engine}"
    )


def _ttft(ttft: Spread | None) -> str:
    return _number(ttft.p50 if ttft else None, 7, 0)


def _number(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"


def _verdict_line(variant: str, phases: Mapping[Phase, Sequence[Figures]]) -> str:
    """At the client, and at the decode worker where that was measured."""
    parts = []
    seen = (
        (("client", False), ("steps", True)) if any(each.step for each in phases[Phase.QUIET]) else (("client", False),)
    )
    for place, of_steps in seen:
        verdict = judge(phases, of_steps)
        if verdict is not None:
            floor = "" if verdict.floor_ratio is None else f", floor {verdict.floor_ratio:.3f}"
            parts.append(f"{place} {verdict.p99_ratio:.3f} (at most {verdict.allowed:.3f}{floor})")
    verdict = judge(phases)
    throughput = "" if verdict is None else f"; throughput {verdict.throughput_ratio:.3f}"
    if verdict is not None and verdict.floor_throughput_ratio is not None:
        throughput += f" (floor {verdict.floor_throughput_ratio:.3f})"
    held = "" if verdict is None else "held" if verdict.holds else "missed"
    return f"{variant}: p99 saturated over quiet: {'; '.join(parts)}{throughput}: {held}"


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {**asdict(verdict), "holds": verdict.holds}


def _cores_line(cores: Sequence[int]) -> str:
    own, shared = cores[0], cores[-1]
    return (
        f"decode on core {own}; router, Redis, prefill and client on core {shared}; colocated and vLLM compute on both"
    )
