"""Figures of `baton bench goodput`: which requests are good, and how rounds are summed up."""

from itertools import accumulate

import pytest

from baton.lab.benchmarks.goodput.figures import (
    LatencyObjectives,
    figures_of,
    judge_request,
    request_tbt_s,
    saturated_tokens_per_s,
)
from baton.lab.benchmarks.serve.load import LoadOutcome, LoadRun

OBJECTIVES = LatencyObjectives(ttft_ms=2000.0, tbt_ms=50.0)


def outcome(ttft_s: float, gaps_s: list[float], prompt_tokens: int = 100, error: str = "") -> LoadOutcome:
    pieces_s = tuple(accumulate([1.0 + ttft_s, *gaps_s]))
    return LoadOutcome(prompt_tokens, 0 if error else len(pieces_s), 1.0, 0.0, pieces_s, error, pieces_s[-1])


def unanswered(waited_s: float) -> LoadOutcome:
    return LoadOutcome(100, 0, 1.0, 0.0, (), "unanswered", 1.0 + waited_s)


@pytest.mark.parametrize(
    ("ttft_s", "gaps_s", "meets"),
    [
        (1.99, [0.04] * 20, (True, True)),
        (2.01, [0.04] * 20, (False, True)),
        (1.0, [0.04] * 19 + [0.06], (True, False)),  # with few gaps the longest counts
        (1.0, [0.04] * 99 + [0.06], (True, True)),  # one gap of 100 may be longer
        (1.0, [0.04] * 98 + [0.06] * 2, (True, False)),
        (1.0, [], (True, True)),
    ],
)
def test_request_is_judged_by_ttft_and_the_99th_percentile_of_its_gaps(
    ttft_s: float, gaps_s: list[float], meets: tuple[bool, bool]
) -> None:
    verdict = judge_request(outcome(ttft_s, gaps_s), OBJECTIVES)
    assert (verdict.meets_ttft, verdict.meets_tbt) == meets
    assert verdict.is_good is all(meets)


def test_failed_request_meets_no_objective() -> None:
    verdict = judge_request(outcome(0.1, [0.01], error="gone"), OBJECTIVES)
    assert not (verdict.meets_ttft or verdict.meets_tbt)


def test_request_without_gaps_has_no_tbt() -> None:
    assert request_tbt_s([]) == 0.0


def test_figures_count_shares_over_all_requests() -> None:
    run = LoadRun((outcome(1.0, [0.01]), outcome(3.0, [0.01]), outcome(1.0, [0.2]), unanswered(9.0)), duration_s=10.0)
    figures = figures_of(run, OBJECTIVES, long_prompt=512)
    assert (figures.share_good, figures.share_ttft, figures.share_tbt) == (0.25, 0.5, 0.5)
    assert (figures.requests, figures.answered) == (4, 3)
    assert figures.output_tokens_per_s == pytest.approx(0.6)


def test_waiting_time_of_an_unanswered_request_counts_as_its_ttft_and_e2el() -> None:
    figures = figures_of(LoadRun((unanswered(60.0),), duration_s=60.0), OBJECTIVES, long_prompt=512)
    assert (figures.ttft_p50, figures.e2el_p50) == (60_000.0, 60_000.0)
    assert figures.itl_p99 is None


def test_wait_after_the_last_token_of_an_unfinished_answer_counts_as_a_gap() -> None:
    stalled = LoadOutcome(100, 0, 0.0, 0.0, (1.0, 1.5), "unanswered", 21.5)
    figures = figures_of(LoadRun((stalled,), duration_s=30.0), OBJECTIVES, long_prompt=512)
    assert figures.longest_gap == 20_000.0


def test_ttft_of_short_and_long_prompts_is_kept_apart() -> None:
    run = LoadRun((outcome(1.0, [], 511), outcome(4.0, [], 512)), duration_s=10.0)
    figures = figures_of(run, OBJECTIVES, long_prompt=512)
    assert figures.short_ttft_p50 == pytest.approx(1000.0)
    assert figures.long_ttft_p90 == pytest.approx(4000.0)
    assert figures.ttft_p50 == pytest.approx(2500.0)


def test_saturated_throughput_counts_the_tokens_of_the_last_three_quarters() -> None:
    two_tokens_a_piece = LoadOutcome(10, 16, 0.0, 0.0, tuple(range(1, 9)), "", 8.0)
    unfinished = LoadOutcome(10, 0, 0.0, 0.0, (3.0, 9.0), "unanswered", 9.0)
    run = LoadRun((two_tokens_a_piece, unfinished), duration_s=9.0)
    assert saturated_tokens_per_s(run, seconds=8.0) == pytest.approx((2 * 6 + 1) / 6.0)
