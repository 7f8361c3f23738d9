"""Log-probabilities: those of the model, whatever the request changes, with ties in order of id."""

from dataclasses import replace

import pytest
import torch

from baton.engine.request import Sample
from baton.engine.sampling.params import SamplingParams
from baton.engine.sampling.sampler import Row, described, sample
from tests.fixtures.paged import drawn

GREEDY = SamplingParams(max_tokens=1)
WILD = replace(GREEDY, temperature=5.0, top_k=5, repetition_penalty=2.0, logit_bias={4: 9.0}, logprobs=4)
HISTORY = (1, 2, 3)


def random_logits(rows: int, vocab_size: int = 300) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(5)) * 3


def test_logprobs_are_those_before_all_changes_of_the_request() -> None:
    logits = random_logits(1)
    [result] = sample(logits, [Row((Sample(0, WILD, HISTORY, 2),), 3)])
    [token] = drawn(result)
    expected = logits[0].log_softmax(-1)
    assert token.logprob == pytest.approx(float(expected[token.token_id]), abs=1e-6)
    likeliest = expected.topk(4)
    assert [each.token_id for each in token.top] == likeliest.indices.tolist()
    assert [each.logprob for each in token.top] == pytest.approx(likeliest.values.tolist(), abs=1e-6)


def test_no_logprobs_without_a_request() -> None:
    [result] = sample(random_logits(1), [Row((Sample(0, GREEDY),), 3)])
    assert drawn(result)[0].top == ()


def test_each_sample_has_its_requested_number_of_logprobs() -> None:
    samples = tuple(Sample(0, replace(GREEDY, logprobs=count)) for count in (2, 0, 5))
    others = Row((Sample(0, replace(GREEDY, logprobs=9)),), 3)
    [result, _] = sample(random_logits(2), [Row(samples, 3), others])
    two, none, five = (token.top for token in drawn(result))
    assert (len(two), len(none), len(five)) == (2, 0, 5)
    assert two == five[:2]


def test_equal_logprobs_stand_in_order_of_id_also_at_the_end() -> None:
    logits = torch.zeros(2, 50)
    logits[0, 44] = logits[0, 7] = 1.0
    [first, second] = described(logits, logits.logsumexp(-1), rows=[0, 1], token_ids=[0, 0], counts=[4, 3])
    assert [each.token_id for each in first.top] == [7, 44, 0, 1]
    assert [each.token_id for each in second.top] == [0, 1, 2]


def test_logprobs_are_limited_to_the_vocabulary() -> None:
    logits = random_logits(1, 3)
    [only] = described(logits, logits.logsumexp(-1), rows=[0], token_ids=[1], counts=[10])
    assert len(only.top) == 3


def test_prompt_is_scored_by_the_logits_before_each_token() -> None:
    """One row per prompt token; the token at p + 1 is scored by row p, the last row scores nothing."""
    logits = random_logits(6)
    prompt = [8, 250, 3, 17, 4, 99]
    scored = described(logits, logits.logsumexp(-1), rows=range(5), token_ids=prompt[1:], counts=[2] * 5)
    for position, token in enumerate(scored):
        expected = logits[position].log_softmax(-1)
        assert token.token_id == prompt[position + 1]
        assert token.logprob == pytest.approx(float(expected[token.token_id]), abs=1e-6)
        assert [each.token_id for each in token.top] == expected.topk(2).indices.tolist()
