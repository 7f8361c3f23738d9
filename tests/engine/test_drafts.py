"""Drafts by prompt lookup."""

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given

from baton.engine.scheduler.drafts import (
    MAX_MATCH_TOKENS,
    MOST_NOTED,
    TOKENS_PER_CALL,
    PerSequenceDrafter,
    PromptLookup,
)
from tests.fixtures.growing_answer import GrowingAnswer


def drafted(token_ids: Sequence[int], most: int = 4) -> list[int]:
    """Of a lookup that has seen the tokens grow to this length."""
    lookup = PromptLookup()
    tokens: list[int] = []
    draft: list[int] = []
    for token_id in token_ids:
        tokens.append(token_id)
        draft = lookup.draft(tokens, most)
    return draft


@pytest.mark.parametrize(
    ("token_ids", "draft"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1]),
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [4, 9, 1, 2]),  # of equal places the newest
        ([7, 1, 2, 3, 9, 8, 1, 2, 4, 9, 7, 1, 2], [3, 9, 8, 1]),  # more tokens alike
        ([5, 6, 5, 6], [5, 6, 5, 6]),  # repeats itself past the end
        ([8, 8, 8], [8, 8, 8, 8]),
        ([1, 2, 3, 4], []),
        ([1, 2, 1], []),  # one token alike is none
        ([1], []),
    ],
)
def test_prompt_lookup_drafts_the_continuation_of_equal_tokens(token_ids: list[int], draft: list[int]) -> None:
    assert drafted(token_ids) == draft


def test_prompt_lookup_drafts_no_more_than_asked_for() -> None:
    assert drafted([1, 2, 3, 4, 5, 1, 2], most=1) == [3]
    assert drafted([1, 2, 3, 4, 5, 1, 2], most=0) == []


def test_long_prompt_is_noted_over_several_steps() -> None:
    token_ids = [*range(1000, 1000 + 2 * TOKENS_PER_CALL), 1, 2, 3, 1, 2]
    lookup = PromptLookup()
    drafts = [lookup.draft(token_ids, 1) for _ in range(3)]
    assert drafts == [[], [], [3]]


def test_prompt_lookup_notes_the_end_of_a_very_long_prompt() -> None:
    token_ids = [1, 2, 3, *range(1000, 1000 + MOST_NOTED), 5, 6, 7, 5, 6]
    lookup = PromptLookup()
    while not (draft := lookup.draft(token_ids, 1)):
        pass
    assert draft == [7]
    assert lookup.draft([*token_ids, 1, 2], 1) == [], "what stood at the beginning is not kept"


def reference(token_ids: Sequence[int], most: int) -> list[int]:
    """By comparing all places."""
    length, best = len(token_ids), (0, 0)
    for place in range(1, length - 1):
        alike = 0
        while alike < MAX_MATCH_TOKENS and alike <= place and token_ids[place - alike] == token_ids[length - 1 - alike]:
            alike += 1
        best = max(best, (alike, place))
    if best[0] < 2:
        return []
    tokens = list(token_ids)
    for step in range(most):
        tokens.append(tokens[best[1] + 1 + step])
    return tokens[length:]


@given(st.lists(st.integers(0, 5), max_size=16), st.integers(1, 5))
def test_prompt_lookup_equals_comparing_all_positions(token_ids: list[int], most: int) -> None:
    assert drafted(token_ids, most) == reference(token_ids, most)


def test_each_answer_is_drafted_from_its_own_tokens() -> None:
    drafter = PerSequenceDrafter(PromptLookup)
    first, second = GrowingAnswer([1, 2, 3, 1, 2]), GrowingAnswer([1, 2, 9, 1, 2])
    assert drafter.drafts_of([first, second], [1, 2]) == [[3], [9, 1]]
    second.token_ids.append(9)
    assert drafter.drafts_of([second], [1]) == [[1]]


def test_statistics_of_an_answer_end_with_it() -> None:
    made: list[PromptLookup] = []

    def make() -> PromptLookup:
        made.append(PromptLookup())
        return made[-1]

    drafter, answer = PerSequenceDrafter(make), GrowingAnswer([1, 2, 1, 2])
    drafter.drafts_of([answer], [1])
    drafter.drafts_of([answer], [1])
    assert len(made) == 1
    drafter.forget(answer)
    drafter.forget(answer)
    drafter.drafts_of([answer], [1])
    assert len(made) == 2
