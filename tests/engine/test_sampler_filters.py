"""Temperature and filters against transformers' warpers, and draws against the distribution they must follow."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from baton.engine.sampling.logits import Candidates, filtered, pick
from baton.engine.sampling.params import SamplingParams

RANDOM = SamplingParams(max_tokens=1, temperature=0.8)
VOCAB = 1500
FILTERS = [
    RANDOM,
    replace(RANDOM, top_k=20),
    replace(RANDOM, top_k=1),
    replace(RANDOM, top_k=1200),
    replace(RANDOM, top_k=VOCAB + 1),
    replace(RANDOM, top_p=0.7),
    replace(RANDOM, top_p=1e-9),
    replace(RANDOM, min_p=0.1),
    replace(RANDOM, min_p=1.0),
    replace(RANDOM, typical_p=0.2),
    replace(RANDOM, typical_p=0.9),
    replace(RANDOM, temperature=1.7, top_k=50, top_p=0.9, min_p=0.02, typical_p=0.8),
    replace(RANDOM, temperature=1.7, top_p=0.9, min_p=0.02, typical_p=0.5),
]


def random_logits(rows: int, vocab_size: int = VOCAB, seed: int = 5) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def warped(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """As transformers' generate does it."""
    warpers: Any = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.typical_p < 1.0:
        warpers.append(TypicalLogitsWarper(params.typical_p))
    result: torch.Tensor = warpers(torch.zeros(len(logits), 1, dtype=torch.long), logits)
    return result


def shares(candidates: Candidates, vocab_size: int = VOCAB) -> torch.Tensor:
    """Probability of every token, `[rows, vocab]`."""
    weights = candidates.cumulative.diff(dim=-1, prepend=torch.zeros_like(candidates.cumulative[:, :1]))
    shares = weights / candidates.cumulative[:, -1:]
    return torch.zeros(len(weights), vocab_size, dtype=torch.float64).scatter_(-1, candidates.token_ids, shares)


@pytest.mark.parametrize("params", FILTERS)
def test_filters_leave_the_tokens_that_transformers_leaves(params: SamplingParams) -> None:
    logits = random_logits(20)
    expected = warped(logits, params)
    ours = shares(filtered(logits, [params] * 20))
    if params.temperature == RANDOM.temperature:
        assert torch.equal(ours > 0, expected.isfinite())
    torch.testing.assert_close(ours.float(), expected.softmax(-1))


def test_rows_of_one_batch_keep_their_own_filters() -> None:
    wide = [params for params in FILTERS if not 0 < params.top_k <= 1024]
    logits = random_logits(len(wide))
    together = shares(filtered(logits, wide))
    for row, params in enumerate(wide):
        torch.testing.assert_close(together[row].float(), warped(logits[row : row + 1], params)[0].softmax(-1))


def test_candidates_do_not_depend_on_how_wide_the_batch_is() -> None:
    """A row of three tokens beside one of a thousand, and whether top-k took the narrow way or not."""
    logits = random_logits(2)
    params = replace(RANDOM, top_k=3, top_p=0.9, min_p=0.01, typical_p=0.9)
    alone = shares(filtered(logits[:1], [params]))
    assert torch.equal(shares(filtered(logits, [params, replace(RANDOM, top_k=1000)]))[:1], alone)
    assert torch.equal(shares(filtered(logits, [params, RANDOM]))[:1], alone)


@pytest.mark.parametrize("other", [replace(RANDOM, top_k=2), RANDOM])
def test_ties_at_the_top_k_boundary_stay(other: SamplingParams) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0], [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])
    ours = shares(filtered(logits, [replace(RANDOM, top_k=2), other]), 6)
    assert torch.nonzero(ours[0])[:, 0].tolist() == [1, 2, 3, 4]


def test_more_ties_than_are_looked_for_at_first_stay() -> None:
    logits = torch.zeros(2, 100)
    logits[1] = torch.arange(100)
    ours = shares(filtered(logits, [replace(RANDOM, top_k=2)] * 2), 100)
    assert [int((row > 0).sum()) for row in ours] == [100, 2]


def test_top_p_that_ends_exactly_at_a_token_leaves_the_rest_out() -> None:
    ours = shares(filtered(torch.zeros(1, 4), [replace(RANDOM, temperature=1.0, top_p=0.5)]), 4)
    assert ours.tolist() == [[0.0, 0.0, 0.5, 0.5]]


@pytest.mark.parametrize("params", [replace(RANDOM, top_k=3), replace(RANDOM, typical_p=0.9), RANDOM])
def test_banned_tokens_are_never_sampled(params: SamplingParams) -> None:
    logits = torch.full((1, 8), float("-inf"))
    logits[0, 5] = 1.0
    assert torch.nonzero(shares(filtered(logits, [params]), 8)).tolist() == [[0, 5]]


def test_pick_never_takes_a_token_without_mass() -> None:
    """Nor does the largest number find nobody, whatever the total's last bits."""
    totals = torch.tensor([1.0, 1.0 + 2.0**-52, 2.0 - 2.0**-52, 2.0, 3.0, 1e5 / 3], dtype=torch.float64)
    cumulative = totals[:, None] * torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    candidates = Candidates(torch.tensor([[3, 5, 8, 9]]).expand(len(totals), -1), cumulative)
    numbers = torch.tensor([[0.0, 0.5, 1 - 2.0**-53]], dtype=torch.float64)
    assert pick(candidates, numbers).tolist() == [[5, 5, 5]] * len(totals)
