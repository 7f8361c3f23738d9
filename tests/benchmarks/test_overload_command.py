"""What the overload benchmark makes of its calls."""

import pytest

from baton.benchmarks.cluster.overload import Call, Report, Setup, as_lines, as_picture, summarise

SETUP = Setup(slots=4, prompt_tokens=64, answer_tokens=192, deadline_s=4.0, seconds=12.0)


def calls() -> list[Call]:
    answered = [Call(second, second + 1.0, 0.1, "answered") for second in range(12)]
    refused = [Call(1.0, 1.01, None, "refused", retry_after_s=2.0)] * 5
    return [*answered, *refused, Call(2.0, 6.0, 0.5, "late")]


def test_goodput_counts_answers_in_time_while_the_load_is_full() -> None:
    measured = summarise(calls(), 2.0, SETUP)
    assert (measured.answered, measured.refused, measured.late) == (12, 5, 1)
    assert measured.goodput_per_s == pytest.approx(9 / 8)  # those that ended from second 4 to second 12
    assert measured.offered_per_s == pytest.approx(18 / 12)
    assert (measured.retry_after_p50_s, measured.refusal_p95_ms) == (2.0, pytest.approx(10.0))


def test_a_report_says_what_is_kept_of_the_peak() -> None:
    best, worst = summarise(calls(), 1.0, SETUP), summarise(calls()[3:7], 10.0, SETUP)
    report = Report(SETUP, 1.0, (best, worst), best, best, worst)
    assert report.kept == pytest.approx(worst.goodput_per_s / best.goodput_per_s)
    assert "of its peak" in "\n".join(as_lines(report))
    assert as_picture(report).startswith("<svg")
