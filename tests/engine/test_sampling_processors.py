"""Bias, bad words, min_tokens and allowed tokens against transformers' processors, and their order."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from baton.engine.request import Sample
from baton.engine.sampling.logits import HistoryMissing, adjust
from baton.engine.sampling.params import SamplingParams

PLAIN = SamplingParams(max_tokens=9)
VOCAB = 40
HISTORY = (3, 9, 3, 30, 9, 9, 12)
PROMPT = 4


def random_logits(rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3)) * 4


def adjusted(logits: torch.Tensor, *kinds: SamplingParams, history: tuple[int, ...] = HISTORY) -> torch.Tensor:
    changed = logits.clone()
    adjust(changed, [Sample(0, params, history, PROMPT) for params in kinds])
    return changed


def processed(processor: Any, logits: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = processor(torch.tensor([HISTORY] * len(logits)), logits)
    return result


def banned(logits: torch.Tensor) -> list[int]:
    return torch.nonzero(logits[0] == -math.inf)[:, 0].tolist()


def test_logit_bias_is_the_sequence_bias_of_transformers() -> None:
    logits = random_logits()
    bias = {4: 2.5, 12: -7.0, 39: 0.125}
    expected = processed(SequenceBiasLogitsProcessor([[[token_id], each] for token_id, each in bias.items()]), logits)
    assert torch.equal(adjusted(logits, replace(PLAIN, logit_bias=bias)), expected)


@pytest.mark.parametrize(
    "words",
    [
        ((7,),),
        ((9, 12, 5),),  # about to be completed
        ((30, 9, 9, 12, 6),),  # begins in the prompt
        ((9, 9, 5),),  # not at the end
        ((12, 1), (12, 2), (8,), (3, 3)),
        ((1, 2, 3, 4, 5, 6, 7, 8, 9),),  # longer than all that was said
    ],
)
def test_bad_words_equal_transformers(words: tuple[tuple[int, ...], ...]) -> None:
    logits = random_logits()
    expected = processed(NoBadWordsLogitsProcessor([list(word) for word in words]), logits)
    assert torch.equal(adjusted(logits, replace(PLAIN, bad_words=words)), expected)


def test_single_stop_token_is_no_bad_word() -> None:
    params = replace(PLAIN, bad_words=((7,), (8,), (12, 11)), stop_token_ids=frozenset({8, 11}))
    expected = processed(NoBadWordsLogitsProcessor([[7], [8], [12, 11]], eos_token_id=[8, 11]), random_logits())
    assert torch.equal(adjusted(random_logits(), params), expected)
    assert banned(expected) == [7, 11]


@pytest.mark.parametrize("min_tokens", [0, 3, 4, 100])
def test_min_tokens_is_that_of_transformers(min_tokens: int) -> None:
    """Three tokens of the answer are there, so that the fourth may be a stop token from min_tokens = 3 down."""
    logits = random_logits()
    params = replace(PLAIN, min_tokens=min_tokens, stop_token_ids=frozenset({8, 11}))
    expected = processed(MinNewTokensLengthLogitsProcessor(PROMPT, min_tokens, [8, 11]), logits)
    assert torch.equal(adjusted(logits, params), expected)
    assert banned(adjusted(logits, params)) == ([8, 11] if min_tokens > 3 else [])


def test_only_allowed_tokens_are_left() -> None:
    ours = adjusted(random_logits(), replace(PLAIN, allowed_token_ids=frozenset({5, 6, 30})))
    assert torch.nonzero(ours[0].isfinite())[:, 0].tolist() == [5, 6, 30]
    assert torch.equal(ours[0, [5, 6, 30]], random_logits()[0, [5, 6, 30]])


def test_all_together_are_in_the_order_of_transformers() -> None:
    logits = random_logits()
    params = replace(
        PLAIN,
        logit_bias={9: -3.0, 12: 5.0},
        repetition_penalty=1.4,
        bad_words=((12, 30),),
        min_tokens=8,
        stop_token_ids=frozenset({3}),
    )
    processors: Any = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor([[[9], -3.0], [[12], 5.0]]),
            RepetitionPenaltyLogitsProcessor(1.4),
            NoBadWordsLogitsProcessor([[12, 30]]),
            MinNewTokensLengthLogitsProcessor(PROMPT, 8, 3),
        ]
    )
    assert torch.equal(adjusted(logits, params), processed(processors, logits))


def test_rows_of_a_batch_are_independent() -> None:
    kinds = [
        replace(PLAIN, logit_bias={4: 2.0, 39: 1.0}),
        PLAIN,
        replace(PLAIN, allowed_token_ids=frozenset({1, 2})),
        replace(PLAIN, bad_words=((7,), (12, 0))),
        replace(PLAIN, allowed_token_ids=frozenset({39}), logit_bias={0: 9.0}),
        replace(PLAIN, min_tokens=8, stop_token_ids=frozenset({0, 39}), repetition_penalty=2.0),
    ]
    logits = random_logits(len(kinds))
    together = adjusted(logits, *kinds)
    for row, params in enumerate(kinds):
        assert torch.equal(together[row], adjusted(logits[row : row + 1], params)[0])
    assert torch.equal(together[1], logits[1])


def test_tokens_that_the_model_does_not_have_are_of_no_effect() -> None:
    """Rows lie one after the other: an id beyond the vocabulary must not reach the next row."""
    strange = replace(
        PLAIN,
        logit_bias={VOCAB: 5.0, -1: 5.0},
        bad_words=((VOCAB + 1,), (12, VOCAB + 2)),
        min_tokens=9,
        stop_token_ids=frozenset({VOCAB + 3}),
    )
    logits = random_logits(3)
    assert torch.equal(adjusted(logits, PLAIN, strange, PLAIN), logits)
    allowed = adjusted(logits, PLAIN, replace(PLAIN, allowed_token_ids=frozenset({4, VOCAB + 1})), PLAIN)
    assert torch.nonzero(allowed[1].isfinite())[:, 0].tolist() == [4]
    assert torch.equal(allowed[2], logits[2])


@pytest.mark.parametrize(
    "fields",
    [{"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"min_tokens": 1}, {"bad_words": ((1, 2),)}],
)
def test_history_left_out_by_the_scheduler_is_named(fields: dict[str, Any]) -> None:
    with pytest.raises(HistoryMissing, match=r"Sample\.history"):
        adjust(random_logits(), [Sample(0, replace(PLAIN, **fields))])
