"""Sampling parameters: what they imply for sampler and scheduler, and the values they refuse."""

import math
from dataclasses import replace
from typing import Any

import pytest

from baton.engine.sampling.params import SamplingParams

PLAIN = SamplingParams(max_tokens=9)


@pytest.mark.parametrize(
    ("fields", "adjusts_logits", "needs_history"),
    [
        ({}, False, False),
        ({"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9}, False, False),
        ({"stop_token_ids": frozenset({3}), "logprobs": 4, "prompt_logprobs": 0, "n": 4, "seed": 9}, False, False),
        ({"logit_bias": {4: 1.0}}, True, False),
        ({"allowed_token_ids": frozenset({1})}, True, False),
        ({"bad_words": ((4,), (5,))}, True, False),
        ({"repetition_penalty": 1.1}, True, True),
        ({"presence_penalty": -0.1}, True, True),
        ({"frequency_penalty": 0.1}, True, True),
        ({"min_tokens": 1}, True, True),
        ({"bad_words": ((4,), (5, 6))}, True, True),
    ],
)
def test_params_say_whether_they_adjust_logits_and_need_the_history(
    fields: dict[str, Any], adjusts_logits: bool, needs_history: bool
) -> None:
    params = replace(PLAIN, **fields)
    assert (params.adjusts_logits, params.needs_history) == (adjusts_logits, needs_history)


def test_params_with_a_constraint_need_the_history_and_exclude_tokens() -> None:
    constraint: Any = object()
    params = replace(PLAIN, constraint=constraint)
    assert (params.adjusts_logits, params.needs_history) == (False, True)
    assert (params.takes_any_token, params.drawn_alone) == (False, False)
    assert (PLAIN.takes_any_token, PLAIN.drawn_alone) == (True, True)


def test_params_are_hashable_and_equal_by_value() -> None:
    biased = replace(PLAIN, logit_bias={4: 1.0})
    assert biased == replace(PLAIN, logit_bias={4: 1.0}) != PLAIN
    assert hash(biased) == hash(replace(PLAIN, logit_bias={4: 1.0}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("typical_p", 0.0),
        ("typical_p", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {3: math.inf}),
        ("min_tokens", -1),
        ("allowed_token_ids", frozenset()),
        ("bad_words", ((1,), ())),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
    ],
)
def test_value_without_meaning_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field}:? must be"):
        replace(PLAIN, **{field: value})
