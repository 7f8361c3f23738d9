"""Penalties against transformers, and against the formulas of OpenAI's API reference."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from baton.engine.request import Sample
from baton.engine.sampling.logits import penalise
from baton.engine.sampling.params import SamplingParams

PLAIN = SamplingParams(max_tokens=9)
VOCAB = 40
HISTORY = (3, 9, 3, 30, 9, 9, 12)  # the prompt is its first four
PROMPT = 4


def random_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(2)) * 4


def penalised(logits: torch.Tensor, *samples: Sample) -> torch.Tensor:
    changed = logits.clone()
    penalise(changed, samples)
    return changed


def sample_of(params: SamplingParams, history: tuple[int, ...] = HISTORY) -> Sample:
    return Sample(0, params, history, PROMPT)


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits = random_logits(2)
    histories = torch.tensor([HISTORY, (1, 2, 3, 4, 5, 6, 7)])
    processor: Any = RepetitionPenaltyLogitsProcessor(penalty)
    params = replace(PLAIN, repetition_penalty=penalty)
    ours = penalised(logits, *(sample_of(params, tuple(history.tolist())) for history in histories))
    assert torch.equal(ours, processor(histories, logits))


def test_frequency_and_presence_count_the_answer_alone() -> None:
    logits = random_logits(1)
    params = replace(PLAIN, frequency_penalty=0.25, presence_penalty=2.0)
    expected = logits.clone()
    for token_id, occurrences in ((9, 2), (12, 1)):
        expected[0, token_id] = logits[0, token_id] - 0.25 * occurrences - 2.0
    assert torch.equal(penalised(logits, sample_of(params)), expected)


@pytest.mark.parametrize("fields", [{"frequency_penalty": -0.5}, {"presence_penalty": -1.5}])
def test_negative_penalty_favours_earlier_tokens(fields: dict[str, Any]) -> None:
    logits = random_logits(1)
    change = penalised(logits, sample_of(replace(PLAIN, **fields))) - logits
    assert torch.nonzero(change > 0).tolist() == [[0, 9], [0, 12]]
    assert not (change < 0).any()


def test_nothing_is_counted_before_the_first_token() -> None:
    logits = random_logits(1)
    params = replace(PLAIN, frequency_penalty=1.0, presence_penalty=1.0)
    assert torch.equal(penalised(logits, sample_of(params, HISTORY[:PROMPT])), logits)


def test_repetition_penalty_precedes_frequency_and_presence() -> None:
    logits = random_logits(1)
    both = replace(PLAIN, repetition_penalty=1.5, frequency_penalty=0.3, presence_penalty=0.7)
    first = penalised(logits, sample_of(replace(PLAIN, repetition_penalty=1.5)))
    then = penalised(first, sample_of(replace(PLAIN, frequency_penalty=0.3, presence_penalty=0.7)))
    assert torch.equal(penalised(logits, sample_of(both)), then)


def test_rows_of_one_batch_keep_their_own_penalties() -> None:
    kinds = [
        sample_of(replace(PLAIN, repetition_penalty=1.3)),
        sample_of(PLAIN),
        sample_of(replace(PLAIN, repetition_penalty=0.8, presence_penalty=1.0), (5, 5, 6, 7, 8, 8)),
        sample_of(replace(PLAIN, frequency_penalty=0.4)),
    ]
    logits = random_logits(len(kinds))
    together = penalised(logits, *kinds)
    for row, each in enumerate(kinds):
        assert torch.equal(together[row], penalised(logits[row : row + 1], each)[0])
    assert torch.equal(together[1], logits[1])


def test_tokens_that_the_model_cannot_make_are_passed_over() -> None:
    """In the last row they would lie beyond the logits, in any other in the next row."""
    logits = random_logits(2)
    params = replace(PLAIN, repetition_penalty=1.3, frequency_penalty=1.0)
    strange = sample_of(params, (1, 2, VOCAB, -1, VOCAB + 1, 9))
    for samples in ((strange, sample_of(PLAIN)), (sample_of(PLAIN), strange)):
        changed = torch.nonzero(penalised(logits, *samples) != logits).tolist()
        assert changed == [[samples.index(strange), token_id] for token_id in (1, 2, 9)]
