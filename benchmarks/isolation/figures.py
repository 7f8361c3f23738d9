"""The figures of one phase of `baton bench isolation`, and of rounds of them. Pure: logs in, figures out."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from baton.benchmarks.isolation.load import Phase, PhaseLog
from baton.benchmarks.report.statistics import mean_of_worst, median, percentile
from baton.launch.errors import CommandFailed

P99_OVER_QUIET, P99_OVER_FLOOR, LEAST_THROUGHPUT = 1.15, 1.05, 0.95  # the requirements of a saturated phase


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the decode worker's engine, monotonic seconds."""

    started: float
    ended: float
    tokens: int


@dataclass(frozen=True, slots=True)
class EngineTime:
    """The kernel's times of the engine's thread over the time that counts, in seconds."""

    on_core: float
    waiting: float  # for its core, which someone else had


@dataclass(frozen=True, slots=True)
class Objectives:
    """The promises to a user: the longest time to first token, and between two tokens."""

    ttft_ms: float
    tbt_ms: float


@dataclass(frozen=True, slots=True)
class Spread:
    """Of times in milliseconds."""

    p50: float
    p99: float
    max: float
    worst10: float  # mean of the worst 10 %


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one phase, or the medians of several. Spreads in milliseconds, rates per second; None: there was nothing."""

    tbt: Spread  # between two messages with tokens of a long answer, as the client sees it
    step: Spread | None  # between the ends of two steps of the decode worker
    answer_ttft: Spread | None
    prompt_ttft: Spread | None
    answer_tokens_per_s: float
    answer_goodput_per_s: float  # tokens that came in time
    prompts_per_s: float
    prompt_goodput_per_s: float  # prompts whose first token came in time
    engine_cpu_ms: float | None  # of a step, on the decode worker's core
    engine_wait_ms: float | None  # of a step: it could have run, and its core was taken


@dataclass(frozen=True, slots=True)
class Verdict:
    """Medians over rounds of a saturated phase against the quiet one of the same round."""

    p99_ratio: float
    floor_ratio: float | None  # of the floor phase
    allowed: float
    throughput_ratio: float
    floor_throughput_ratio: float | None

    @property
    def holds(self) -> bool:
        return self.p99_ratio <= self.allowed and self.throughput_ratio >= LEAST_THROUGHPUT


def figures_of(
    log: PhaseLog, objectives: Objectives, steps: Sequence[Step] = (), engine: EngineTime | None = None
) -> Figures:
    """Raises: CommandFailed where no long answer made two tokens in the time that counts."""
    seconds = log.ended - log.began
    gaps = [gap for answer in log.answers for gap in _gaps_ms(answer.arrivals, log)]
    if not gaps:
        raise CommandFailed(f"in {seconds:.1f} s no long answer went on by two tokens: give more --seconds")
    counted = [step for step in steps if log.began <= step.ended < log.ended]
    step_gaps = _gaps_ms([step.ended for step in steps], log)
    late = sum(gap > objectives.tbt_ms for gap in gaps)
    prompts = [prompt for prompt in log.prompts if prompt.arrivals and log.began <= prompt.arrivals[0] < log.ended]
    prompt_ttfts = [prompt.ttft_s * 1e3 for prompt in prompts]
    return Figures(
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


def spread(values_ms: Sequence[float]) -> Spread:
    """Raises: ValueError without values."""
    return Spread(
        percentile(values_ms, 50), percentile(values_ms, 99), percentile(values_ms, 100), mean_of_worst(values_ms)
    )


def medians(rounds: Sequence[Figures]) -> Figures:
    """Each figure by itself, over the rounds that have it; at least one round."""
    if not rounds:
        raise ValueError("no rounds")
    return Figures(*(_middle([getattr(each, figure.name) for each in rounds]) for figure in fields(Figures)))


def judge(rounds: Mapping[Phase, Sequence[Figures]], of_steps: bool = False) -> Verdict | None:
    """None where there was no quiet or no saturated phase. `of_steps`: by the decode worker's own steps."""
    quiet, saturated = rounds.get(Phase.QUIET), rounds.get(Phase.SATURATED)
    if not quiet or not saturated:
        return None
    floor = rounds.get(Phase.FLOOR)
    floor_ratio = _ratio(floor, quiet, of_steps) if floor else None
    return Verdict(
        p99_ratio=_ratio(saturated, quiet, of_steps),
        floor_ratio=floor_ratio,
        allowed=max(P99_OVER_QUIET, P99_OVER_FLOOR * (floor_ratio or 0.0)),
        throughput_ratio=_throughput_ratio(saturated, quiet),
        floor_throughput_ratio=_throughput_ratio(floor, quiet) if floor else None,
    )


def _throughput_ratio(loaded: Sequence[Figures], quiet: Sequence[Figures]) -> float:
    return median([a.answer_tokens_per_s / b.answer_tokens_per_s for a, b in zip(loaded, quiet, strict=True)])


def _ratio(loaded: Sequence[Figures], quiet: Sequence[Figures], of_steps: bool) -> float:
    """Median over rounds of p99 over that of the same round's quiet phase."""
    return median([_p99(a, of_steps) / _p99(b, of_steps) for a, b in zip(loaded, quiet, strict=True)])


def _p99(figures: Figures, of_steps: bool) -> float:
    times = figures.step if of_steps and figures.step else figures.tbt
    return times.p99


def _gaps_ms(times: Sequence[float], log: PhaseLog) -> list[float]:
    """Between neighbours, where the second is within the time that counts."""
    pairs = itertools.pairwise(times)
    return [(after - before) * 1e3 for before, after in pairs if log.began <= after < log.ended]


def _middle(values: Sequence[Any]) -> Any:
    """The median of numbers, or of each part of spreads; None where there are none."""
    there = [value for value in values if value is not None]
    if not there or not isinstance(there[0], Spread):
        return median(there) if there else None
    return Spread(*(median([getattr(spread, part.name) for spread in there]) for part in fields(Spread)))
