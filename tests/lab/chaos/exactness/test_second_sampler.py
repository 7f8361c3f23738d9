"""The oracle's sampler and the engine's sampler, which share no code, draw the same tokens."""

import random
from typing import Any

import numpy
import pytest
import torch

from baton.engine.request import uniform
from baton.engine.sampling.logits import filtered, pick
from baton.engine.sampling.params import SamplingParams
from baton.lab.chaos.exactness.second_sampler import Filters, adjusted, drawn, uniform_number

DRAWS = 60


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"typical_p": 0.7},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.8},
    ],
    ids=str,
)
def test_second_sampler_equals_the_engine(options: dict[str, Any]) -> None:
    draw, close = random.Random(3), 0
    for _ in range(DRAWS):
        scores = numpy.array([draw.gauss(0.0, 2.0) for _ in range(50)], dtype=numpy.float32)
        params = SamplingParams(max_tokens=1, temperature=draw.uniform(0.3, 1.5), **options)
        number = draw.random()
        candidates = filtered(torch.from_numpy(scores)[None], [params])
        expected = int(pick(candidates, torch.tensor([[number]], dtype=torch.float64)))
        made = drawn(scores.astype(numpy.float64), Filters(params.temperature, **options), number)
        assert made.token_id == expected or made.is_close
        close += made.is_close
    assert close < DRAWS // 10


def test_uniform_number_equals_the_documented_one() -> None:
    draw = random.Random(4)
    for _ in range(100):
        where = draw.randrange(2**64), draw.randrange(8), draw.randrange(10**6)
        assert uniform_number(*where) == uniform(*where)


def test_draw_near_a_bound_is_close() -> None:
    even = numpy.zeros(2)  # probabilities 0.5 and 0.5
    closeness = [drawn(even, Filters(1.0), number).is_close for number in (0.25, 0.49995, 0.50005, 0.75)]
    assert closeness == [False, True, True, False]
    assert drawn(even, Filters(1.0, top_k=1), 0.25).is_close
    assert drawn(even, Filters(0.0), 0.25).is_close


def test_penalties_count_prompt_and_answer_as_documented() -> None:
    options = {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25, "logit_bias": {3: 4.0}}
    scores = adjusted(numpy.array([1.0, -1.0, 1.0, 1.0]), prompt=[0], answer=[1, 1], options=options)
    assert scores.tolist() == [0.5, -2.0 - 2 * 0.5 - 0.25, 1.0, 5.0]
