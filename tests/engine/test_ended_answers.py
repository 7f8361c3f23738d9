"""Drafts out of answers that have ended: never across salts, bounded, and really what followed."""

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.request import Computed, Drawn, Request
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.drafts import MAX_MATCH_TOKENS
from baton.engine.scheduler.ended_answers import (
    MATCH_TOKENS,
    MAX_ANSWER_TOKENS,
    PROMPT_TAIL,
    Continued,
    EndedAnswers,
    SharedLookup,
)
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.speculation import Speculation
from tests.fixtures.growing_answer import GrowingAnswer

OURS, THEIRS = b"o" * 32, b"t" * 32
FEWEST = min(MATCH_TOKENS)
ANSWER = [*range(100, 140)]


def kept(*answers: tuple[bytes, Sequence[int]], most_tokens: int = 1000) -> EndedAnswers:
    """Each with a prompt of one token, all of them in the table."""
    ended = EndedAnswers(most_tokens)
    for salt, token_ids in answers:
        ended.keep(salt, token_ids, prompt_tokens=1)
        ended.note(len(token_ids))
    return ended


def test_continuation_in_a_finished_answer_is_found() -> None:
    ended = kept((OURS, ANSWER))
    assert ended.after(OURS, [1, 2, *ANSWER[10:20]], 3) == Continued(MAX_MATCH_TOKENS, ANSWER[20:23])
    assert ended.after(OURS, [1, 2, *ANSWER[10:15]], 3) == Continued(5, ANSWER[15:18])
    assert ended.after(OURS, [1, 2, *ANSWER[10:13]], 3) is None, "too few are alike"
    assert ended.after(OURS, ANSWER[-6:], 3) is None, "nothing followed"
    assert ended.after(OURS, ANSWER[-7:-1], 3) == Continued(6, ANSWER[-1:])


def test_nothing_is_found_under_another_salt() -> None:
    assert kept((OURS, ANSWER)).after(THEIRS, ANSWER[:20], 3) is None


def test_end_of_a_prompt_is_kept_and_no_more_of_it() -> None:
    ended, prompt = EndedAnswers(), [*range(1000, 1000 + 3 * PROMPT_TAIL)]
    ended.keep(OURS, prompt + ANSWER, len(prompt))
    ended.note(1000)
    assert ended.after(OURS, prompt, 4) == Continued(MAX_MATCH_TOKENS, ANSWER[:4])
    assert ended.after(OURS, prompt[: 2 * PROMPT_TAIL - 1], 4) is None
    assert ended.tokens == PROMPT_TAIL + len(ANSWER)


def test_answer_that_was_of_use_stays_longer() -> None:
    first, second, third = ([*range(begin, begin + 20)] for begin in (100, 200, 300))
    ended = kept((OURS, first), (OURS, second), most_tokens=40)
    assert ended.after(OURS, first[:8], 1) is not None
    ended.keep(OURS, third, 1)
    ended.note(100)
    found = [ended.after(OURS, tokens[:8], 1) is not None for tokens in (first, second, third)]
    assert found == [True, False, True]


def test_long_answer_is_noted_over_several_steps() -> None:
    ended = EndedAnswers()
    ended.keep(OURS, [*range(600)], 1)
    found = []
    for _ in range(3):
        ended.note(256)
        found.append(ended.after(OURS, [*range(500, 520)], 1) is not None)
    assert found == [False, False, True]


def test_of_a_very_long_answer_the_end_is_kept() -> None:
    ended = kept((OURS, [*range(MAX_ANSWER_TOKENS + 100)]), most_tokens=1 << 18)
    assert ended.tokens == MAX_ANSWER_TOKENS
    assert ended.after(OURS, [*range(50, 60)], 1) is None
    assert ended.after(OURS, [*range(MAX_ANSWER_TOKENS, MAX_ANSWER_TOKENS + 20)], 1) == Continued(
        8, [MAX_ANSWER_TOKENS + 20]
    )


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=24)
SALTS = st.sampled_from([OURS, THEIRS])


@settings(max_examples=150)
@given(st.lists(st.tuples(SALTS, TOKENS), max_size=6), SALTS, TOKENS, st.integers(1, 4), st.integers(10, 60))
def test_draft_is_the_continuation_in_a_kept_answer_of_equal_salt(
    answers: list[tuple[bytes, list[int]]], salt: bytes, token_ids: list[int], most: int, most_tokens: int
) -> None:
    ended = kept(*answers, most_tokens=most_tokens)
    assert ended.tokens <= most_tokens
    found = ended.after(salt, token_ids, most)
    followed = {
        tuple(tokens[place : place + most])
        for owner, tokens in answers
        if owner == salt
        for place in range(FEWEST, len(tokens))
        if tokens[max(0, place - MAX_MATCH_TOKENS) : place][-FEWEST:] == token_ids[-FEWEST:]
    }
    if found is None:
        return
    assert tuple(found.token_ids) in followed
    assert FEWEST <= found.alike <= MAX_MATCH_TOKENS
    assert any(
        owner == salt
        and tokens[place - found.alike : place] == token_ids[-found.alike :]
        and tokens[place : place + most] == list(found.token_ids)
        for owner, tokens in answers
        for place in range(found.alike, len(tokens))
    )


@given(st.lists(st.tuples(SALTS, TOKENS), min_size=1, max_size=5), st.integers(0, 4))
def test_newest_kept_answer_is_always_found(answers: list[tuple[bytes, list[int]]], back: int) -> None:
    salt, tokens = answers[-1]
    ended, place = kept(*answers), len(tokens) - 1 - back
    if place >= FEWEST:
        found = ended.after(salt, tokens[:place], 1)
        assert found is not None and found.alike >= FEWEST


def drafted(token_ids: Sequence[int], salt: bytes | None = OURS) -> list[int]:
    """Beside an answer that has ended."""
    lookup = SharedLookup()
    lookup.forget(GrowingAnswer(list(ANSWER), OURS, prompt_tokens=1))
    [draft] = lookup.drafts_of([GrowingAnswer(list(token_ids), salt)], [3])
    return list(draft)


def test_own_tokens_precede_equal_matches_of_others() -> None:
    assert drafted(ANSWER[:8]) == ANSWER[8:11]
    own = [*ANSWER[:8], 7, 7, 7, *ANSWER[:8]]
    assert drafted(own) == [7, 7, 7]
    less = [*ANSWER[6:8], 7, 7, 7, *ANSWER[:8]]
    assert drafted(less) == ANSWER[8:11]


@pytest.mark.parametrize("salt", [None, THEIRS])
def test_answer_of_another_salt_or_none_drafts_for_itself_alone(salt: bytes | None) -> None:
    assert drafted(ANSWER[:8], salt) == []
    assert drafted([*ANSWER[:8], 7, 7, 7, *ANSWER[:8]], salt) == [7, 7, 7]


@pytest.mark.parametrize("salt", [OURS, None])
def test_same_question_again_is_answered_in_fewer_steps(salt: bytes | None) -> None:
    """Without a salt, and so outside of all caches, nothing is kept either."""
    lookup = SharedLookup()
    speculation = Speculation(4, drafter=lookup)
    scheduler = Scheduler(BlockPool(64), 4, max_step_tokens=64, max_sequences=8, speculation=speculation)
    steps = []
    for number in range(2):
        scheduler.add(Request(number, tuple(range(10)), SamplingParams(max_tokens=40), ()), salt)
        steps.append(0)
        while (plan := scheduler.plan()) is not None:
            ends = [chunk.end for chunk in plan.chunks]
            scheduler.commit(plan, [Computed((Drawn(1000 + end, 0.0),)) for end in ends])
            scheduler.observe(plan, duration_s=1.0)
            steps[-1] += 1
    assert steps[0] == 40
    assert (steps[1] < 20) == (salt is not None)
    assert (lookup.ended.tokens > 0) == (salt is not None)
