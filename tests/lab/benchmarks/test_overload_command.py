"""What the overload benchmark makes of its calls."""

import pytest

from baton.lab.benchmarks.cluster.overload import Report, Setup, as_lines, as_picture, summarise
from baton.lab.benchmarks.serve.load import Outcome
from baton.launch import CommandFailed

SETUP = Setup(slots=4, prompt_tokens=64, answer_tokens=192, deadline_s=4.0, seconds=12.0)


def call(sent_s: float, ended_s: float, ttft_s: float | None, code: str = "", retry_after_s: float = 0.0) -> Outcome:
    pieces_s = () if ttft_s is None else (sent_s + ttft_s,)
    return Outcome(64, 192, sent_s, 0.0, pieces_s, code, ended_s, code, retry_after_s)


def calls() -> list[Outcome]:
    answered = [call(second, second + 1.0, 0.1) for second in range(12)]
    refused = [call(1.0, 1.01, None, "RESOURCE_EXHAUSTED", 2.0)] * 5
    return [*answered, *refused, call(2.0, 6.0, 0.5, "DEADLINE_EXCEEDED")]


def test_goodput_counts_answers_in_time_while_the_load_is_full() -> None:
    measured = summarise(calls(), 2.0, SETUP)
    assert (measured.answered, measured.refused, measured.late) == (12, 5, 1)
    assert measured.goodput_per_s == pytest.approx(9 / 8)  # those that ended from second 4 to second 12
    assert measured.offered_per_s == pytest.approx(18 / 12)
    assert (measured.retry_after_p50_s, measured.refusal_p95_ms) == (2.0, pytest.approx(10.0))


def test_a_call_that_fails_otherwise_ends_the_benchmark() -> None:
    with pytest.raises(CommandFailed, match="INTERNAL"):
        summarise([*calls(), call(1.0, 2.0, None, "INTERNAL")], 2.0, SETUP)


def test_a_report_says_what_is_kept_of_the_peak() -> None:
    best, worst = summarise(calls(), 1.0, SETUP), summarise(calls()[3:7], 10.0, SETUP)
    report = Report(SETUP, 1.0, (best, worst), best, best, worst)
    assert report.kept == pytest.approx(worst.goodput_per_s / best.goodput_per_s)
    assert "of its peak" in "\n".join(as_lines(report))
    assert as_picture(report).startswith("<svg")
