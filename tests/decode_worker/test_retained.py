"""Answers that have ended are kept for a while, within bounds, and given out once."""

from hypothesis import given
from hypothesis import strategies as st

from baton.decode_worker.retained import EndedOutputs, RetainedBounds, RetainedOutputs
from baton.engine.request import Drawn

GRACE_S = 10.0


def answer(tokens: int, answered: int = 0) -> RetainedOutputs:
    kept = RetainedOutputs(range(answered))
    for token in range(tokens - answered):
        kept.add(token % 2, Drawn(token, -0.5), None)
    return kept


def test_answer_is_there_for_its_grace_and_not_longer() -> None:
    ended: EndedOutputs[str] = EndedOutputs(GRACE_S, RetainedBounds(answers=8, tokens=100))
    kept = answer(5)
    ended.keep("early", kept, now=0.0)
    ended.keep("late", answer(3), now=0.1)
    assert ended.take("early", now=9.9) is kept
    assert ended.take("early", now=9.9) is None
    assert (len(ended), ended.tokens) == (1, 3)
    ended.expire(now=10.1)
    assert (len(ended), ended.tokens) == (0, 0)
    assert ended.take("late", now=10.1) is None


def test_logprobs_are_retained_only_if_requested() -> None:
    for with_logprobs in (False, True):
        kept = RetainedOutputs((), with_logprobs)
        kept.add(0, Drawn(7, -0.5), None)
        assert len(kept.choices[0].logged) == with_logprobs


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40), st.floats(0, 4)), max_size=40))
def test_oldest_answers_are_evicted_above_the_limit(events: list[tuple[int, int, float]]) -> None:
    bounds = RetainedBounds(answers=4, tokens=60)
    ended: EndedOutputs[int] = EndedOutputs(GRACE_S, bounds)
    model: list[tuple[int, int, float]] = []  # key, tokens, expiry; oldest first
    now = 0.0
    for key, tokens, later_s in events:
        now += later_s
        ended.keep(key, answer(tokens, answered=tokens // 3), now)
        model = [each for each in model if each[0] != key and each[2] > now] + [(key, tokens, now + GRACE_S)]
        while len(model) > bounds.answers or sum(each[1] for each in model) > bounds.tokens:
            del model[0]
        assert (len(ended), ended.tokens) == (len(model), sum(each[1] for each in model))
    for key in range(10):
        assert (ended.take(key, now) is not None) == (key in [each[0] for each in model])
    assert ended.tokens == 0
