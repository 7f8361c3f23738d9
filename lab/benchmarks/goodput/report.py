"""Report of `baton bench goodput` as table and JSON. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from baton.lab.benchmarks.goodput.figures import GoodputFigures, LatencyObjectives, medians
from baton.lab.report.result import SERVICE, Columns, Result, make_result, table


@dataclass(frozen=True, slots=True)
class GoodputReport:
    """Figures of all rounds, by the name of the system."""

    model: str
    dtype: str
    objectives: LatencyObjectives
    load: str  # mix of lengths, or name of the trace
    duration: str  # duration of a round, or its number of requests
    seed: int
    in_flight_at_saturation: int
    tokens_per_request: float  # mean output tokens
    settings: Mapping[str, str]  # flags or URL of each system
    batons: tuple[str, ...]  # systems that are Baton
    rounds: Mapping[str, Mapping[float, Sequence[GoodputFigures]]]  # by rate
    saturated: Mapping[str, Sequence[float]]  # output tokens/s of each round
    errors: Mapping[str, Sequence[str]]  # first errors of requests
    failures: Mapping[str, str]  # reason why a system was left out


@dataclass(frozen=True, slots=True)
class RateRow:
    """All rounds of one system at one rate."""

    rate: float
    system: str
    rounds: Sequence[GoodputFigures]


def as_table(report: GoodputReport) -> str:
    """Format medians over rounds, with the worst round in parentheses where there are several."""
    rates = sorted({rate for rounds in report.rounds.values() for rate in rounds})
    rows = [
        RateRow(rate, name, rounds[rate])
        for rate in rates
        for name, rounds in report.rounds.items()
        if rounds.get(rate)
    ]
    lines = [table(rows, COLUMNS)]
    for name, rounds in report.saturated.items():
        if rounds:
            worst = f" (worst {min(rounds):.1f})" if len(rounds) > 1 else ""
            in_flight = report.in_flight_at_saturation
            lines.append(f"{name}: {median(rounds):.1f}{worst} output tokens/s with {in_flight} requests in flight")
    lines += [f"{name} failed: {reason}" for name, reason in report.failures.items()]
    lines += [f"{name}: {error}" for name, errors in report.errors.items() for error in errors]
    count = max((len(each) for rounds in report.rounds.values() for each in rounds.values()), default=0)
    lines.append(
        f"{report.model} in {report.dtype}, {report.load}; {count} rounds of {report.duration} for each rate: medians, "
        "with the worst round in parentheses; times in ms"
    )
    objectives = report.objectives
    lines.append(f"good: TTFT at most {objectives.ttft_ms:g} ms, p99 of its own TBT at most {objectives.tbt_ms:g} ms")
    return "\n".join(lines)


def as_result(report: GoodputReport) -> Result:
    """Return every round and the medians, with their provenance."""
    count = max((len(each) for rounds in report.rounds.values() for each in rounds.values()), default=0)
    return make_result(
        SERVICE,
        [_round(report, number) for number in range(count)],
        None,
        model=report.model,
        dtype=report.dtype,
        objectives=asdict(report.objectives),
        load=report.load,
        duration=report.duration,
        seed=report.seed,
        in_flight_at_saturation=report.in_flight_at_saturation,
        tokens_per_request=report.tokens_per_request,
        systems=dict(report.settings),
        batons=list(report.batons),
        medians={
            name: {f"{rate:g}": asdict(medians(rounds)) for rate, rounds in by_rate.items()}
            for name, by_rate in report.rounds.items()
        },
        errors={name: list(errors) for name, errors in report.errors.items()},
        failures=dict(report.failures),
    )


def _round(report: GoodputReport, number: int) -> dict[str, Any]:
    """Return the figures of one round by system and rate, and its output tokens/s at saturation."""
    return {
        name: {
            "rates": {f"{rate:g}": asdict(rounds[number]) for rate, rounds in by_rate.items() if number < len(rounds)},
            "saturated_tokens_per_s": next(iter(report.saturated.get(name, ())[number : number + 1]), None),
        }
        for name, by_rate in report.rounds.items()
    }


def figure_text(figures: GoodputFigures) -> str:
    """Format the main figures of a round as one line."""
    return (
        f"good {figures.share_good:.2f}, {figures.answered:.0f} of {figures.requests:.0f} answered, "
        f"TTFT p50 {_number(figures.ttft_p50)} ms, ITL p50 {_number(figures.itl_p50, 1)}, p99 "
        f"{_number(figures.itl_p99, 1)} ms"
    )


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _cell(name: str, digits: int, worst: Callable[[Sequence[float]], float] = max) -> Callable[[RateRow], str]:
    """Return a function that formats the median of a figure and its worst round."""

    def cell(row: RateRow) -> str:
        values = [value for each in row.rounds if (value := getattr(each, name)) is not None]
        if not values:
            return "-"
        shown = f"{median(values):.{digits}f}"
        return shown if len(values) == 1 else f"{shown} ({worst(values):.{digits}f})"

    return cell


COLUMNS: Columns[RateRow] = {
    "system": lambda row: row.system,
    "rate": lambda row: f"{row.rate:g}",
    "good": _cell("share_good", 2, min),
    "TTFT met": _cell("share_ttft", 2, min),
    "TBT met": _cell("share_tbt", 2, min),
    "short TTFT p50": _cell("short_ttft_p50", 0),
    "p90": _cell("short_ttft_p90", 0),
    "long TTFT p50": _cell("long_ttft_p50", 0),
    "p90 ": _cell("long_ttft_p90", 0),
    "ITL p50": _cell("itl_p50", 1),
    "p99": _cell("itl_p99", 0),
    "longest": _cell("longest_gap", 0),
    "E2EL p50": _cell("e2el_p50", 0),
    "tokens/s": _cell("output_tokens_per_s", 1, min),
    "answered": lambda row: f"{median([each.answered / each.requests for each in row.rounds]):.2f}",
}
