"""Draws against the exact distribution that transformers' processors leave, feature by feature, by chi-square."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from baton.engine.request import Sample
from baton.engine.sampling.params import SamplingParams
from baton.engine.sampling.sampler import Row, sample
from tests.fixtures.paged import drawn

BASE = SamplingParams(max_tokens=9, temperature=0.8, seed=11)
VOCAB, DRAWS = 16, 6000
HISTORY, PROMPT = (3, 9, 3, 14, 9, 9, 12), 4
BIAS = {3: 1.5, 9: -2.0}


class Presence:
    """As OpenAI's API reference has it, with presence 0.6 and frequency 0.3: no processor of transformers does."""

    def __call__(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(torch.tensor(HISTORY[PROMPT:]), minlength=VOCAB)
        return scores - 0.3 * counts - 0.6 * (counts > 0)


class Allowed:
    def __call__(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(torch.arange(VOCAB) % 2 == 0, float("-inf"))


CASES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "temperature": ({}, []),
    "top_k": ({"top_k": 5}, [TopKLogitsWarper(5)]),
    "top_p": ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    "min_p": ({"min_p": 0.15}, [MinPLogitsWarper(0.15)]),
    "typical_p": ({"typical_p": 0.7}, [TypicalLogitsWarper(0.7)]),
    "repetition": ({"repetition_penalty": 1.8}, [RepetitionPenaltyLogitsProcessor(1.8)]),
    "presence": ({"presence_penalty": 0.6, "frequency_penalty": 0.3}, [Presence()]),
    "bias": (
        {"logit_bias": BIAS},
        [SequenceBiasLogitsProcessor([[[token_id], bias] for token_id, bias in BIAS.items()])],
    ),
    "min_tokens": (
        {"min_tokens": 5, "stop_token_ids": frozenset({2, 7})},
        [MinNewTokensLengthLogitsProcessor(PROMPT, 5, [2, 7])],
    ),
    "bad_words": ({"bad_words": ((9, 12, 4), (6,))}, [NoBadWordsLogitsProcessor([[9, 12, 4], [6]])]),
    "allowed": ({"allowed_token_ids": frozenset(range(1, VOCAB, 2))}, [Allowed()]),
}


def probabilities(logits: torch.Tensor, processors: list[Any]) -> torch.Tensor:
    """Warpers come after temperature, processors before it."""
    warpers = [each for each in processors if type(each).__name__.endswith("Warper")]
    others = [each for each in processors if each not in warpers]
    chain: Any = LogitsProcessorList([*others, TemperatureLogitsWarper(BASE.temperature), *warpers])
    scores: torch.Tensor = chain(torch.tensor([HISTORY]), logits)
    return scores[0].double().softmax(-1)


def one_in_ten_thousand(freedom: int) -> float:
    """The chi-square that chance exceeds so rarely (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * freedom)
    value: float = freedom * (1 - spread + 3.719 * spread**0.5) ** 3
    return value


@pytest.mark.parametrize(
    ("vary", "name"), [*product(["choice", "position"], CASES), ("seed", "temperature"), ("seed", "top_p")]
)
def test_draws_follow_the_distribution(vary: str, name: str) -> None:
    fields, processors = CASES[name]
    params = replace(BASE, **fields)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    counts = torch.bincount(torch.tensor(DRAW[vary](logits, params)), minlength=VOCAB)
    expected = probabilities(logits, processors) * DRAWS
    possible = expected > 0
    assert not counts[~possible].any()
    statistic = float(((counts - expected) ** 2 / expected)[possible].sum())
    assert statistic < one_in_ten_thousand(int(possible.sum()) - 1)


def by_choice(logits: torch.Tensor, params: SamplingParams) -> list[int]:
    samples = tuple(Sample(choice, params, HISTORY, PROMPT) for choice in range(DRAWS))
    [result] = sample(logits, [Row(samples, len(HISTORY))])
    return [token.token_id for token in drawn(result)]


def by_position(logits: torch.Tensor, params: SamplingParams) -> list[int]:
    rows = [Row((Sample(0, params, HISTORY, PROMPT),), position) for position in range(DRAWS)]
    return [drawn(result)[0].token_id for result in sample(logits.expand(DRAWS, -1), rows)]


def by_seed(logits: torch.Tensor, params: SamplingParams) -> list[int]:
    rows = [Row((Sample(0, replace(params, seed=seed), HISTORY, PROMPT),), len(HISTORY)) for seed in range(DRAWS)]
    return [drawn(result)[0].token_id for result in sample(logits.expand(DRAWS, -1), rows)]


DRAW: dict[str, Callable[[torch.Tensor, SamplingParams], list[int]]] = {
    "choice": by_choice,
    "position": by_position,
    "seed": by_seed,
}
