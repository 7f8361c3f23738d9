"""Figures of an agent's session."""

from collections.abc import Sequence
from typing import Any

import pytest

from baton.lab.benchmarks.agents.figures import MeasuredSession, MeasuredTurn, measure
from baton.lab.benchmarks.agents.worker import ANSWER_HALF, ANSWER_STARTED, AgentEvent


def started(request: str, step: int | None, prompt: Sequence[int], answer: Sequence[int] = ()) -> AgentEvent:
    return AgentEvent(ANSWER_STARTED, step, 1, request, prompt, answer)


def span(request: str, cached_tokens: int, outcome: str = "answered") -> dict[str, Any]:
    attributes = {
        "gen_ai.response.id": request,
        "baton.outcome": outcome,
        "gen_ai.usage.cache_read.input_tokens": cached_tokens,
        "baton.ttft_ms": 5.0,
    }
    return {"attributes": attributes}


def test_measure_counts_complete_blocks_of_earlier_prompts_and_answers_as_reusable() -> None:
    events = [
        started("one", 0, range(10), [10, 11]),
        AgentEvent(ANSWER_HALF, 0, 1, "one"),
        started("one", 0, range(10), [10, 11]),  # a second attempt
        started("two", 1, range(14)),
    ]
    measured = measure(events, [span("one", 0), {"attributes": {}}, span("two", 8)], block_tokens=4)
    assert measured.turns == [MeasuredTurn(0, 10, 0, 0, 5.0), MeasuredTurn(1, 14, 8, 8, 5.0)]
    assert (measured.cached_share, measured.repeated_share, measured.unanswered) == (1.0, 1.0, 0)
    assert measured.last_prompt_tokens == 14


def test_measure_with_a_cache_miss_shows_the_lost_share() -> None:
    events = [started("one", 0, range(8)), started("two", 1, range(9)), started("three", 2, range(8))]
    measured = measure(events, [span("one", 0), span("two", 0), span("three", 4)], block_tokens=4)
    assert measured.cached_share == pytest.approx(4 / 8), "the last token of a prompt is not reusable"


def test_measure_counts_requests_without_an_answer_apart() -> None:
    events = [started("one", 0, range(8)), started("two", 0, range(8)), started("title", None, range(4))]
    measured = measure(events, [span("one", 0, "failed"), span("title", 4)], block_tokens=4)
    assert (len(measured.turns), measured.unanswered) == (1, 2)
    assert measured.repeated_share == 1.0


def test_measure_with_a_changed_prompt_repeats_less() -> None:
    events = [started("one", 0, range(8)), started("two", 1, [0, 1, 9, 9, 9, 9, 9, 9, 9])]
    assert measure(events, [], block_tokens=4).repeated_share == 0.25


def test_ttft_fit_separates_new_tokens_from_the_number_of_the_turn() -> None:
    new = [9000, 10, 300, 40, 500, 20, 100, 80]
    turns = [MeasuredTurn(n, 9000 + tokens, 9000, 9000, 20 + 2 * n + tokens / 10) for n, tokens in enumerate(new)]
    fit = MeasuredSession(turns, 0, 1.0, 9080).ttft
    assert fit is not None
    assert (fit.per_turn_ms, fit.per_new_token_ms) == pytest.approx((2.0, 0.1))
    assert MeasuredSession(turns[:5], 0, 1.0, 9040).ttft is None
