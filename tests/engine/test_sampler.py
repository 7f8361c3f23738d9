"""Sampling: greedy and random draws, what a row is independent of, and rows that fail alone."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from baton.engine.request import NonFinite, Sample
from baton.engine.sampling.params import SamplingParams
from baton.engine.sampling.sampler import Row, sample
from tests.fixtures.paged import drawn

RANDOM = SamplingParams(max_tokens=1, temperature=0.8, seed=11)
GREEDY = SamplingParams(max_tokens=1)
HISTORY = (1, 2, 3, 4, 2)
KINDS = [
    GREEDY,
    RANDOM,
    replace(RANDOM, top_k=20),
    replace(RANDOM, top_k=7, top_p=0.8, min_p=0.01),
    replace(RANDOM, top_p=0.7),
    replace(RANDOM, typical_p=0.6),
    replace(RANDOM, top_k=1100, min_p=0.05),
    replace(RANDOM, repetition_penalty=1.3, logprobs=3),
    replace(GREEDY, presence_penalty=1.0, frequency_penalty=0.4, logprobs=5),
    replace(RANDOM, logit_bias={5: 4.0}, bad_words=((4, 2, 9), (17,))),
    replace(GREEDY, min_tokens=9, stop_token_ids=frozenset({8})),
    replace(RANDOM, allowed_token_ids=frozenset(range(40)), logprobs=1),
]


def random_logits(rows: int, vocab_size: int = 300) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(5)) * 3


def row_of(params: SamplingParams, position: int = 40, choice: int = 0) -> Row:
    return Row((Sample(choice, params, HISTORY, prompt_tokens=3),), position)


def test_result_does_not_depend_on_its_neighbours() -> None:
    """Every kind alone, then all kinds in one batch, forwards and backwards."""
    rows = [row_of(params, position) for position, params in enumerate(KINDS)]
    logits = random_logits(len(rows), 1500)
    alone = [sample(logits[index : index + 1], [row])[0] for index, row in enumerate(rows)]
    assert sample(logits, rows) == alone
    assert sample(logits.flip(0), rows[::-1]) == alone[::-1]


@pytest.mark.parametrize("params", [each for each in KINDS if not each.greedy])
def test_uniform_number_between_two_tokens_samples_the_same_with_any_neighbour(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There a sum that is taken in another way parts from it by its last bit."""
    logits, rows = random_logits(1 + len(KINDS)), [row_of(params), *map(row_of, KINDS)]

    def token(number: float, beside: int = 0) -> int:
        monkeypatch.setattr("baton.engine.sampling.sampler.uniform", lambda *_: number)
        return drawn(sample(logits[: 1 + beside], rows[: 1 + beside])[0])[0].token_id

    for begin in (0, 3, 6):
        low, high = begin / 8, (begin + 0.999) / 8
        while low < (middle := (low + high) / 2) < high:
            low, high = (middle, high) if token(middle) == token(low) else (low, middle)
        assert [token(number, len(KINDS)) for number in (low, high)] == [token(low), token(high)]


def test_batch_beyond_the_scratch_memory_is_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row_of(params, position) for position, params in enumerate(KINDS * 3)]
    logits = random_logits(len(rows))
    whole = sample(logits, rows)
    monkeypatch.setattr("baton.engine.sampling.sampler.CPU_SCRATCH_ELEMENTS", 650)
    assert sample(logits, rows) == whole


def test_samples_of_different_kinds_share_a_row() -> None:
    logits = random_logits(1)
    samples = tuple(Sample(0, params, HISTORY, prompt_tokens=3) for params in KINDS)
    [together] = sample(logits, [Row(samples, 9)])
    assert together == tuple(drawn(sample(logits, [Row((each,), 9)])[0])[0] for each in samples)


def test_choices_with_own_histories_are_sampled_from_own_distributions() -> None:
    params = replace(GREEDY, bad_words=((4, 2),))
    best, second = random_logits(1)[0].topk(2).indices.tolist()
    params = replace(GREEDY, bad_words=((4, best),))
    samples = (Sample(0, params, [1, 4], 1), Sample(1, params, [1, 3], 1))
    [result] = sample(random_logits(1), [Row(samples, 2)])
    assert [token.token_id for token in drawn(result)] == [second, best]


def test_choices_of_one_row_are_drawn_apart() -> None:
    samples = tuple(Sample(choice, RANDOM) for choice in range(30))
    [result] = sample(random_logits(1) / 3, [Row(samples, 9)])
    assert len({token.token_id for token in drawn(result)}) > 10


@pytest.mark.parametrize("params", [RANDOM, replace(RANDOM, top_k=9), replace(RANDOM, presence_penalty=0.5)])
def test_choices_of_one_row_equal_single_ones(params: SamplingParams) -> None:
    logits = random_logits(1)
    samples = tuple(Sample(choice, params, HISTORY, 3) for choice in range(8))
    [together] = sample(logits, [Row(samples, 9)])
    assert together == tuple(drawn(sample(logits, [Row((each,), 9)])[0])[0] for each in samples)


def test_greedy_takes_the_likeliest_with_its_logprob() -> None:
    logits = random_logits(3)
    results = sample(logits, [Row((Sample(0, GREEDY),), 1)] * 3)
    for row, result in zip(logits, results, strict=True):
        [token] = drawn(result)
        assert token.token_id == int(row.argmax())
        assert token.logprob == pytest.approx(float(row.log_softmax(-1).max()), abs=1e-5)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("params", KINDS)
def test_nonfinite_row_fails_alone(poison: float, params: SamplingParams) -> None:
    logits = random_logits(3)
    rows = [row_of(params, position) for position in range(3)]
    clean = sample(logits, rows)
    logits[1, 117] = poison
    assert sample(logits, rows) == [clean[0], NonFinite(), clean[2]]


@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_row_that_fails_may_be_the_only_one(params: SamplingParams) -> None:
    assert sample(torch.full((1, 300), math.nan), [row_of(params)]) == [NonFinite()]
    nothing_left = replace(params, logit_bias=dict.fromkeys(range(300), -math.inf))
    assert sample(random_logits(1), [row_of(nothing_left)]) == [NonFinite()]


@pytest.mark.parametrize("base", [GREEDY, RANDOM, replace(RANDOM, top_k=5)])
@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": frozenset({7}), "bad_words": ((7,),)},
        {"allowed_token_ids": frozenset({300})},
        {"logit_bias": dict.fromkeys(range(300), -math.inf)},
        {"logit_bias": {3: 1e39}},
    ],
)
def test_row_that_its_request_leaves_no_token_fails_alone(base: SamplingParams, fields: dict[str, Any]) -> None:
    logits = random_logits(3)
    others = row_of(base, 1), row_of(base, 3)
    clean = sample(logits, [others[0], row_of(base, 2), others[1]])
    hopeless = row_of(replace(base, **fields), 2)
    assert sample(logits, [others[0], hopeless, others[1]]) == [clean[0], NonFinite(), clean[2]]


def test_logits_are_not_changed() -> None:
    logits = random_logits(len(KINDS))
    before = logits.clone()
    sample(logits, [row_of(params) for params in KINDS])
    assert torch.equal(logits, before)


def test_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = random_logits(5)
    results = sample(logits, [Row((Sample(0, replace(RANDOM, temperature=1e-300)),), 1)] * 5)
    assert [drawn(result)[0].token_id for result in results] == logits.argmax(-1).tolist()


def test_plain_greedy_rows_never_reach_the_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a request that asks for nothing special pays nothing")

    for name in ("adjust", "filtered", "pick", "uniform"):
        monkeypatch.setattr(f"baton.engine.sampling.sampler.{name}", refuse)
    monkeypatch.setattr("baton.engine.sampling.sampler.likeliest", refuse)
    assert len(sample(random_logits(4), [Row((Sample(0, GREEDY),), 1)] * 4)) == 4
