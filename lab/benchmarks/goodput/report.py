"""Report of `baton bench goodput` as table, result and charts, with the verdict on each Baton. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

from baton.lab.benchmarks.goodput.figures import GoodputFigures
from baton.lab.benchmarks.goodput.verdict import Contest, PromiseFinding, judge_contest
from baton.lab.commands.bench_options import Variant
from baton.lab.report.picture import Axis, DrawnCurve, LineChart, draw_lines
from baton.lab.report.result import SERVICE, Columns, Promise, Result, make_result, table
from baton.lab.report.statistics import medians
from baton.process.objectives import LatencyObjectives


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

    @property
    def round_count(self) -> int:
        return max((len(each) for rounds in self.rounds.values() for each in rounds.values()), default=0)


@dataclass(frozen=True, slots=True)
class RateRow:
    """All rounds of one system at one rate."""

    rate: float
    system: str
    rounds: Sequence[GoodputFigures]


@dataclass(frozen=True, slots=True)
class JudgedPromise:
    """Promise judged on medians over rounds. `held`, `missed`: number of single rounds that keep or miss it."""

    finding: PromiseFinding
    held: int
    missed: int


def judge_report(report: GoodputReport) -> dict[str, list[JudgedPromise]]:
    """Return the judged promises of each Baton against all peers, by name; empty without a peer."""
    judged = {}
    for name in report.batons if len(report.batons) < len(report.settings) else ():
        single = [judge_contest(_contest(report, name, partial(_nth, number))) for number in range(report.round_count)]
        judged[name] = [
            JudgedPromise(finding, *(sum(each.holds is kept for each in rounds) for kept in (True, False)))
            for finding, *rounds in zip(judge_contest(_contest(report, name, _median_of)), *single, strict=True)
        ]
    return judged


def _contest(report: GoodputReport, baton: str, pick: Callable[[Sequence[Any]], Any]) -> Contest:
    """Return the contest of one Baton against all peers. `pick` reduces rounds to one value, None if it has none."""
    figures = {
        name: {rate: picked for rate, rounds in by_rate.items() if (picked := pick(rounds)) is not None}
        for name, by_rate in report.rounds.items()
    }
    tokens_per_s = {name: picked for name, rounds in report.saturated.items() if (picked := pick(rounds)) is not None}
    peers = [name for name in report.settings if name not in report.batons]
    return Contest(
        ours=figures[baton],
        peers={name: figures[name] for name in peers},
        our_tokens_per_s=tokens_per_s.get(baton),
        peer_tokens_per_s={name: tokens_per_s[name] for name in peers if name in tokens_per_s},
        tokens_per_request=report.tokens_per_request,
        reference=str(Variant.VLLM) if Variant.VLLM in peers else peers[0],
    )


def _nth(number: int, rounds: Sequence[Any]) -> Any:
    return rounds[number] if number < len(rounds) else None


def _median_of(rounds: Sequence[Any]) -> Any:
    """Return the median of rounds of figures or numbers; None without rounds."""
    if not rounds:
        return None
    return medians(rounds) if isinstance(rounds[0], GoodputFigures) else median(rounds)


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
    lines.append(
        f"{report.model} in {report.dtype}, {report.load}; {report.round_count} rounds of {report.duration} a rate: "
        "medians, with the worst round in parentheses; times in ms"
    )
    objectives = report.objectives
    lines.append(f"good: TTFT at most {objectives.ttft_ms:g} ms, p99 of its own TBT at most {objectives.tbt_ms:g} ms")
    for name, judged in judge_report(report).items():
        lines += [f"{name}: {_promise_text(each)}" for each in judged]
    return "\n".join(lines)


def _promise_text(judged: JudgedPromise) -> str:
    finding = judged.finding
    word = {True: "held", False: "missed", None: "open"}[finding.holds]
    return f"{word} ({judged.held} rounds held, {judged.missed} missed): {finding.promise}: {finding.detail}"


def as_result(report: GoodputReport) -> Result:
    """Return every round and the medians, with their provenance."""
    judged = judge_report(report)
    headline = judged[report.batons[0]][0] if judged else None
    return make_result(
        SERVICE,
        [_round(report, number) for number in range(report.round_count)],
        None if headline is None else Promise(headline.finding.promise, headline.held, headline.missed),
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
        findings={name: [asdict(each) for each in promises] for name, promises in judged.items()},
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


def pictures_of(report: GoodputReport) -> dict[str, str]:
    """Draw share of good requests, TTFT against TBT, and time to the answer, by name; charts without a point are left
    out.
    """
    objectives = report.objectives
    both = f"TTFT of {objectives.ttft_ms:g} ms and TBT of {objectives.tbt_ms:g} ms"
    rate = Axis("requests per second")
    share_ticks = tuple(tenth / 10 for tenth in range(0, 11, 2))
    charts = {
        "share": LineChart(
            f"Requests that meet {both}",
            rate,
            Axis("share of requests", ticks=share_ticks),
            _curves(report, lambda rate, each: (rate, each.share_good)),
        ),
        "ttft-tbt": LineChart(
            "TTFT against TBT at each rate: nearer to the lower left corner is better in both",
            Axis("TTFT p90, ms", is_log=True),
            Axis("TBT p99, ms", is_log=True),
            _curves(report, lambda _, each: _both(each.ttft_p90, each.itl_p99)),
        ),
        "answer": LineChart(
            "Time to the complete answer",
            rate,
            Axis("p50, seconds"),
            _curves(report, lambda rate, each: None if each.e2el_p50 is None else (rate, each.e2el_p50 / 1e3)),
        ),
    }
    return {name: draw_lines(chart) for name, chart in charts.items() if any(each.points for each in chart.curves)}


def _both(x: float | None, y: float | None) -> tuple[float, float] | None:
    return None if x is None or y is None else (x, y)


def _curves(
    report: GoodputReport, point: Callable[[float, GoodputFigures], tuple[float, float] | None]
) -> tuple[DrawnCurve, ...]:
    """Return a curve of medians for each system, in order of rate."""
    curves = []
    for name, by_rate in report.rounds.items():
        points = [point(rate, medians(rounds)) for rate, rounds in sorted(by_rate.items()) if rounds]
        curves.append(DrawnCurve(name, tuple(each for each in points if each is not None)))
    return tuple(each for each in curves if each.points)


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
