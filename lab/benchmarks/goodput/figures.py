"""Figures of one system at one rate: shares of requests that meet the objectives, TTFT, ITL, time to the answer. Pure.

A request is good if its TTFT is at most the TTFT objective and the 99th percentile (nearest rank, so the longest of
fewer than 100) of its gaps between tokens at most the TBT objective. A request that fails, gets fewer tokens than
requested or is unanswered at the end meets neither objective; its waiting time so far counts as TTFT and E2EL.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from baton.lab.benchmarks.serve.load import Job, LoadOutcome, LoadRun
from baton.lab.report.statistics import percentile
from baton.process.objectives import LatencyObjectives

ERRORS_SHOWN = 3
WARM_SHARE = 0.25  # fraction of a saturation round whose tokens are not counted


@dataclass(frozen=True, slots=True)
class GoodputFigures:
    """Figures of one round, or the medians of several. Times in milliseconds; None without values."""

    requests: float
    answered: float
    share_good: float  # share of requests that meet both objectives
    share_ttft: float
    share_tbt: float
    ttft_p50: float | None
    ttft_p90: float | None
    short_ttft_p50: float | None
    short_ttft_p90: float | None
    long_ttft_p50: float | None
    long_ttft_p90: float | None
    itl_p50: float | None  # over the gaps of all requests
    itl_p99: float | None
    longest_gap: float | None
    e2el_p50: float | None  # time to the complete answer
    output_tokens_per_s: float
    client_late_p99: float | None  # delay of the client in sending


@dataclass(frozen=True, slots=True)
class RequestVerdict:
    meets_ttft: bool
    meets_tbt: bool

    @property
    def is_good(self) -> bool:
        return self.meets_ttft and self.meets_tbt


def judge_request(outcome: LoadOutcome, objectives: LatencyObjectives) -> RequestVerdict:
    if outcome.error:
        return RequestVerdict(False, False)
    return RequestVerdict(
        outcome.ttft_s * 1e3 <= objectives.ttft_ms, request_tbt_s(outcome.gaps_s) * 1e3 <= objectives.tbt_ms
    )


def request_tbt_s(gaps_s: Sequence[float]) -> float:
    """Return the 99th percentile of a request's gaps by nearest rank; 0 without gaps."""
    return sorted(gaps_s)[math.ceil(0.99 * len(gaps_s)) - 1] if gaps_s else 0.0


def figures_of(run: LoadRun, objectives: LatencyObjectives, long_prompt: int) -> GoodputFigures:
    """Compute the figures of a round. `long_prompt`: fewest tokens of a long prompt. Raises: ValueError for an empty
    round.
    """
    outcomes = run.outcomes
    if not outcomes:
        raise ValueError("a round needs at least one request")
    verdicts = [judge_request(each, objectives) for each in outcomes]
    gaps_ms = [gap_s * 1e3 for each in outcomes for gap_s in _gaps_s(each)]
    ttfts_ms = [(_ttft_ms(each), each.prompt_tokens >= long_prompt) for each in outcomes]
    short, long = ([ms for ms, is_long in ttfts_ms if is_long is wanted] for wanted in (False, True))
    total = len(outcomes)
    return GoodputFigures(
        requests=total,
        answered=sum(not each.error for each in outcomes),
        share_good=sum(each.is_good for each in verdicts) / total,
        share_ttft=sum(each.meets_ttft for each in verdicts) / total,
        share_tbt=sum(each.meets_tbt for each in verdicts) / total,
        ttft_p50=_percentile([ms for ms, _ in ttfts_ms], 50),
        ttft_p90=_percentile([ms for ms, _ in ttfts_ms], 90),
        short_ttft_p50=_percentile(short, 50),
        short_ttft_p90=_percentile(short, 90),
        long_ttft_p50=_percentile(long, 50),
        long_ttft_p90=_percentile(long, 90),
        itl_p50=_percentile(gaps_ms, 50),
        itl_p99=_percentile(gaps_ms, 99),
        longest_gap=max(gaps_ms, default=None),
        e2el_p50=_percentile([(each.ended_s - each.sent_s) * 1e3 for each in outcomes], 50),
        output_tokens_per_s=sum(map(_tokens, outcomes)) / run.duration_s,
        client_late_p99=_percentile([each.late_s * 1e3 for each in outcomes], 99),
    )


def saturated_tokens_per_s(run: LoadRun, seconds: float) -> float:
    """Return the output tokens per second of a closed loop of `seconds`, without its first quarter.

    A piece of an answer counts as the mean number of tokens of that answer's pieces.
    """
    begin_s = seconds * WARM_SHARE
    tokens = 0.0
    for each in run.outcomes:
        inside = sum(begin_s <= piece_s < seconds for piece_s in each.pieces_s)
        tokens += inside * (_tokens(each) / len(each.pieces_s) if each.pieces_s else 0.0)
    return tokens / (seconds - begin_s)


def first_errors(run: LoadRun) -> tuple[str, ...]:
    """Return the first few different errors."""
    return tuple(dict.fromkeys(each.error for each in run.outcomes if each.error))[:ERRORS_SHOWN]


def mean_output_tokens(jobs: Sequence[Job]) -> float:
    """Return the mean number of output tokens of a request. Raises: ValueError without jobs."""
    if not jobs:
        raise ValueError("the mean needs at least one request")
    return sum(job.output_tokens for job in jobs) / len(jobs)


def _tokens(outcome: LoadOutcome) -> int:
    """Return the output tokens of a request; the number of received pieces if the request is unfinished."""
    return outcome.output_tokens or len(outcome.pieces_s)


def _gaps_s(outcome: LoadOutcome) -> list[float]:
    """Return the gaps between tokens; an unfinished answer adds its wait after the last token."""
    waited_s = [outcome.ended_s - outcome.pieces_s[-1]] if outcome.error and outcome.pieces_s else []
    return outcome.gaps_s + waited_s


def _ttft_ms(outcome: LoadOutcome) -> float:
    first_s = outcome.pieces_s[0] if outcome.pieces_s else outcome.ended_s
    return (first_s - outcome.sent_s) * 1e3


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return percentile(values, percent) if values else None
