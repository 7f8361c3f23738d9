"""Figures of `baton bench isolation`, per phase and over rounds, and the report as table, JSON or chart. Pure."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from baton.lab.benchmarks.isolation.load import LoadPhase, PhaseLoad, PhaseLog
from baton.lab.commands.bench_options import Variant
from baton.lab.report.picture import Axis, BarChart, Bars, draw_bars
from baton.lab.report.result import Columns, Promise, Result, judge_rounds, make_result, table
from baton.lab.report.statistics import MeanEstimate, mean_of_worst, medians, percentile
from baton.launch import CommandFailed

P99_OVER_QUIET, P99_OVER_FLOOR, LEAST_THROUGHPUT = 1.15, 1.05, 0.95  # limits of a saturated phase


@dataclass(frozen=True, slots=True)
class Step:
    """Step of the decode worker's engine, in monotonic seconds."""

    started: float
    ended: float
    tokens: int


@dataclass(frozen=True, slots=True)
class EngineTime:
    """Scheduling times of the engine's thread in the measured interval, in seconds."""

    on_core: float
    waiting: float  # time in which the thread was runnable but another thread had the core


@dataclass(frozen=True, slots=True)
class LoadObjectives:
    """Objectives of a phase: longest time to first token, and longest time between two tokens."""

    ttft_ms: float
    tbt_ms: float


@dataclass(frozen=True, slots=True)
class TimeSpread:
    """Percentiles of times in milliseconds."""

    p50: float
    p99: float
    max: float
    worst10: float  # mean of the worst 10 %


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """Figures of one phase, or the medians of several. Times in milliseconds, rates per second; None without values."""

    tbt: TimeSpread  # time between two messages of a long answer, at the client
    step: TimeSpread | None  # time between the ends of two decode steps
    answer_ttft: TimeSpread | None
    prompt_ttft: TimeSpread | None
    answer_tokens_per_s: float
    answer_goodput_per_s: float  # tokens within the TBT objective
    prompts_per_s: float
    prompt_goodput_per_s: float  # prompts within the TTFT objective
    engine_cpu_ms: float | None  # CPU time of a decode step
    engine_wait_ms: float | None  # time in a decode step in which the thread waited for the core


@dataclass(frozen=True, slots=True)
class IsolationVerdict:
    """Ratios of the saturated phase to the quiet phase of the same round, as medians over rounds."""

    p99_ratio: float
    floor_ratio: float | None  # p99 ratio of the floor phase to the quiet phase
    allowed: float
    throughput_ratio: float
    floor_throughput_ratio: float | None

    @property
    def holds(self) -> bool:
        return self.p99_ratio <= self.allowed and self.throughput_ratio >= LEAST_THROUGHPUT


def figures_of(
    log: PhaseLog, objectives: LoadObjectives, steps: Sequence[Step] = (), engine: EngineTime | None = None
) -> PhaseFigures:
    """Compute the figures of a phase. Raises: CommandFailed if no long answer has two tokens in the measured time."""
    seconds = log.ended - log.began
    gaps = [gap for answer in log.answers for gap in _gaps_ms(answer.arrivals, log)]
    if not gaps:
        raise CommandFailed(f"no long answer got two tokens in {seconds:.1f} s: increase --seconds")
    counted = [step for step in steps if log.began <= step.ended < log.ended]
    step_gaps = _gaps_ms([step.ended for step in steps], log)
    late = sum(gap > objectives.tbt_ms for gap in gaps)
    prompts = [prompt for prompt in log.prompts if prompt.arrivals and log.began <= prompt.arrivals[0] < log.ended]
    prompt_ttfts = [prompt.ttft_s * 1e3 for prompt in prompts]
    return PhaseFigures(
        tbt=spread(gaps),
        step=spread(step_gaps) if step_gaps else None,
        answer_ttft=spread([answer.ttft_s * 1e3 for answer in log.answers]),
        prompt_ttft=spread(prompt_ttfts) if prompt_ttfts else None,
        answer_tokens_per_s=len(gaps) / seconds,
        answer_goodput_per_s=(len(gaps) - late) / seconds,
        prompts_per_s=len(prompts) / seconds,
        prompt_goodput_per_s=sum(ttft <= objectives.ttft_ms for ttft in prompt_ttfts) / seconds,
        engine_cpu_ms=engine.on_core / len(counted) * 1e3 if engine and counted else None,
        engine_wait_ms=engine.waiting / len(counted) * 1e3 if engine and counted else None,
    )


def spread(values_ms: Sequence[float]) -> TimeSpread:
    """Compute percentiles. Raises: ValueError without values."""
    return TimeSpread(
        percentile(values_ms, 50), percentile(values_ms, 99), percentile(values_ms, 100), mean_of_worst(values_ms)
    )


def judge(rounds: Mapping[LoadPhase, Sequence[PhaseFigures]], of_steps: bool = False) -> IsolationVerdict | None:
    """Judge the rounds; None without a quiet or a saturated phase. `of_steps`: use decode steps, not client times."""
    quiet, saturated = rounds.get(LoadPhase.QUIET), rounds.get(LoadPhase.SATURATED)
    if not quiet or not saturated:
        return None
    floor = rounds.get(LoadPhase.FLOOR)
    floor_ratio = _ratio(floor, quiet, of_steps) if floor else None
    return IsolationVerdict(
        p99_ratio=_ratio(saturated, quiet, of_steps),
        floor_ratio=floor_ratio,
        allowed=max(P99_OVER_QUIET, P99_OVER_FLOOR * (floor_ratio or 0.0)),
        throughput_ratio=_throughput_ratio(saturated, quiet),
        floor_throughput_ratio=_throughput_ratio(floor, quiet) if floor else None,
    )


def _throughput_ratio(loaded: Sequence[PhaseFigures], quiet: Sequence[PhaseFigures]) -> float:
    return median([a.answer_tokens_per_s / b.answer_tokens_per_s for a, b in zip(loaded, quiet, strict=True)])


def _ratio(loaded: Sequence[PhaseFigures], quiet: Sequence[PhaseFigures], of_steps: bool) -> float:
    """Return p99 of a phase over p99 of the quiet phase in the same round, as the median over rounds."""
    return median([_p99(a, of_steps) / _p99(b, of_steps) for a, b in zip(loaded, quiet, strict=True)])


def _p99(figures: PhaseFigures, of_steps: bool) -> float:
    times = figures.step if of_steps and figures.step else figures.tbt
    return times.p99


def _gaps_ms(times: Sequence[float], log: PhaseLog) -> list[float]:
    """Return the gaps between consecutive times that end within the measured interval."""
    pairs = itertools.pairwise(times)
    return [(after - before) * 1e3 for before, after in pairs if log.began <= after < log.ended]


Rounds = Mapping[str, Mapping[LoadPhase, Sequence[PhaseFigures]]]  # figures of each round, by variant and phase


@dataclass(frozen=True, slots=True)
class Report:
    model: str
    dtype: str
    quantize: str
    cores: tuple[int, ...]
    load: PhaseLoad
    objectives: LoadObjectives
    rounds: Rounds


def as_table(report: Report) -> str:
    """Format medians over rounds as a table, with the verdicts."""
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
        f"{report.model} ({report.dtype}, weights: {report.quantize}), {load.answers} answers, prompts of "
        f"{load.prompt_tokens} tokens: {load.prompts_per_s:g}/s when paced, {load.prompts_in_flight} in flight when "
        f"saturated; {count} rounds of {load.seconds:g} s; in time: TBT {report.objectives.tbt_ms:g} ms, "
        f"TTFT {report.objectives.ttft_ms:g} ms"
    )
    lines.append(f"{_cores_line(report.cores)}; w10%: mean of the worst 10 %")
    return "\n".join(lines)


MEASURES = ("engine", "kernels", "decode_worker", "prefill_worker")
PROMISE = (
    f"p99 between tokens next to prompts at most {P99_OVER_QUIET} times the quiet one, or {P99_OVER_FLOOR} times the "
    f"floor's ratio; throughput of the answers at least {LEAST_THROUGHPUT} of the quiet one"
)


def as_json(report: Report) -> Result:
    """Return every round by variant and phase, with two verdicts over all rounds: one by the client's times, which
    decides, and one by the decode steps.
    """
    judged = {
        variant: {"client": judge(phases), "steps": judge(phases, of_steps=True)}
        for variant, phases in report.rounds.items()
    }
    verdicts = {
        variant: {name: _verdict(verdict) for name, verdict in of_variant.items() if verdict is not None}
        for variant, of_variant in judged.items()
    }
    count = max((len(rounds) for phases in report.rounds.values() for rounds in phases.values()), default=0)
    rounds = [
        {
            variant: {phase: asdict(figures[number]) for phase, figures in phases.items() if figures}
            for variant, phases in report.rounds.items()
        }
        for number in range(count)
    ]
    return make_result(
        MEASURES,
        rounds,
        _kept(report.rounds.get(Variant.SPLIT, {})),
        model=report.model,
        dtype=report.dtype,
        quantize=report.quantize,
        cores=list(report.cores),
        load=asdict(report.load),
        objectives=asdict(report.objectives),
        verdicts=verdicts,
    )


def _kept(phases: Mapping[LoadPhase, Sequence[PhaseFigures]]) -> Promise | None:
    """Judge each single round of the variant with one prefill and one decode worker; None if it was not measured."""
    rounds = [dict(zip(phases, each, strict=True)) for each in zip(*phases.values(), strict=True)]
    verdicts = [judge({phase: [figures] for phase, figures in each.items()}) for each in rounds]
    return judge_rounds(PROMISE, (each.holds for each in verdicts if each is not None)) if any(verdicts) else None


def as_picture(report: Report) -> str:
    """Draw p99 of the time between tokens as the client sees it; whiskers span the rounds."""
    phases = [phase for phase in LoadPhase if any(rounds.get(phase) for rounds in report.rounds.values())]
    series = tuple(
        Bars(variant, tuple(_bar(rounds.get(phase, ())) for phase in phases))
        for variant, rounds in report.rounds.items()
    )
    title = f"Time between tokens of {report.load.answers} answers beside prompts of {report.load.prompt_tokens} tokens"
    return draw_bars(BarChart(title, Axis("p99, ms", is_log=True), tuple(map(str, phases)), series))


def _bar(rounds: Sequence[PhaseFigures]) -> MeanEstimate | None:
    p99s = [each.tbt.p99 for each in rounds]
    return MeanEstimate(medians(rounds).tbt.p99, min(p99s), max(p99s)) if p99s else None


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


COLUMNS: Columns[tuple[str, PhaseFigures]] = {
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


def _verdict_line(variant: str, phases: Mapping[LoadPhase, Sequence[PhaseFigures]], verdict: IsolationVerdict) -> str:
    """Return the verdict at the client, and at the decode worker if measured."""
    of_steps = judge(phases, of_steps=True) if any(each.step for each in phases[LoadPhase.QUIET]) else None
    parts = []
    for place, judged in (("client", verdict), ("steps", of_steps)):
        if judged is not None:
            floor = "" if judged.floor_ratio is None else f", floor {judged.floor_ratio:.3f}"
            parts.append(f"{place} {judged.p99_ratio:.3f} (at most {judged.allowed:.3f}{floor})")
    floor = "" if verdict.floor_throughput_ratio is None else f" (floor {verdict.floor_throughput_ratio:.3f})"
    parts.append(f"throughput {verdict.throughput_ratio:.3f}{floor}")
    return f"{variant}: p99 saturated over quiet: {'; '.join(parts)}: {'held' if verdict.holds else 'missed'}"


def _verdict(verdict: IsolationVerdict) -> dict[str, Any]:
    return {**asdict(verdict), "holds": verdict.holds}


def _cores_line(cores: Sequence[int]) -> str:
    own, shared = cores[0], cores[-1]
    return (
        f"decode on core {own}; router, Redis, prefill and client on core {shared}; colocated and vLLM compute on both"
    )
