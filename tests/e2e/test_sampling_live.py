"""Penalties, biases, bans and log-probabilities of a real stack equal those of transformers, in fp32."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.client import BatonClient, Choice
from tests.e2e.stack import Stack

NEW_TOKENS = 32
PROMPT = [random.Random(3).randrange(3, 512) for _ in range(45)]
TOLERANCE = 1e-4


class Oracle:
    """Model of transformers with the checkpoint that the stack serves."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.plain = self.generate()

    def generate(self, **options: Any) -> list[int]:
        """Generate greedily with the logits processors that the options ask for."""
        tokens = torch.tensor([PROMPT])
        mask = torch.ones_like(tokens)
        with torch.inference_mode():
            answer = self.model.generate(
                tokens, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, **options
            )
        return [int(token_id) for token_id in answer[0, len(PROMPT) :]]

    def logprobs(self, answer: list[int]) -> torch.Tensor:
        """Return log-probabilities by position in the answer and token id."""
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor([PROMPT + answer])).logits[0, len(PROMPT) - 1 : -1]
        return logits.log_softmax(-1)


@pytest.fixture(scope="module")
def oracle(tiny_llama: Path) -> Oracle:
    return Oracle(tiny_llama)


@pytest.fixture
def baton(stack: Stack) -> Iterator[BatonClient]:
    with BatonClient(stack.target, timeout_s=60) as client:
        yield client


def greedy(baton: BatonClient, **options: Any) -> Choice:
    answer = baton.complete(PROMPT, max_tokens=NEW_TOKENS, temperature=0.0, **options)
    return answer.choices[0]


def test_repetition_penalty(baton: BatonClient, oracle: Oracle) -> None:
    expected = oracle.generate(repetition_penalty=1.3)
    assert expected != oracle.plain
    assert list(greedy(baton, repetition_penalty=1.3).token_ids) == expected


def test_logit_biases(baton: BatonClient, oracle: Oracle) -> None:
    biases = {oracle.plain[0]: -100.0, oracle.plain[9]: -2.5, 77: 0.5}
    expected = oracle.generate(sequence_bias=[[[token_id], bias] for token_id, bias in biases.items()])
    assert expected != oracle.plain
    assert list(greedy(baton, logit_bias=biases).token_ids) == expected


def test_bad_words_as_tokens(baton: BatonClient, oracle: Oracle) -> None:
    words = [oracle.plain[:1], oracle.plain[4:6], oracle.plain[10:13]]
    expected = oracle.generate(bad_words_ids=words)
    assert expected != oracle.plain
    assert list(greedy(baton, bad_words=words).token_ids) == expected


def test_bad_words_as_texts(baton: BatonClient, oracle: Oracle) -> None:
    """A banned text is banned with and without a space before it."""
    words = {oracle.tokenizer.decode([token_id]).strip() for token_id in oracle.plain}
    texts = sorted(word for word in words if word and word.isascii())[:8]
    spaced = [f"{space}{text}" for text in texts for space in ("", " ")]
    tokens = [oracle.tokenizer.encode(text, add_special_tokens=False) for text in spaced]
    expected = oracle.generate(bad_words_ids=tokens)
    assert expected != oracle.plain
    assert list(greedy(baton, bad_words=texts).token_ids) == expected


def test_min_tokens(baton: BatonClient, oracle: Oracle) -> None:
    stop = oracle.plain[3]
    eos = [oracle.model.config.eos_token_id, stop]
    stopped = oracle.generate(eos_token_id=eos)
    assert len(stopped) <= 4
    expected = oracle.generate(eos_token_id=eos, min_new_tokens=12)
    assert len(expected) >= 12
    assert list(greedy(baton, stop_token_ids=[stop]).token_ids) == stopped
    assert list(greedy(baton, stop_token_ids=[stop], min_tokens=12).token_ids) == expected


def test_all_sampling_parameters_work_together(baton: BatonClient, oracle: Oracle) -> None:
    expected = oracle.generate(
        repetition_penalty=1.2,
        sequence_bias=[[[oracle.plain[2]], -3.0]],
        bad_words_ids=[oracle.plain[:1]],
        min_new_tokens=8,
    )
    asked = greedy(
        baton,
        repetition_penalty=1.2,
        logit_bias={oracle.plain[2]: -3.0},
        bad_words=[oracle.plain[:1]],
        min_tokens=8,
    )
    assert list(asked.token_ids) == expected


def test_only_allowed_tokens_come(baton: BatonClient, oracle: Oracle) -> None:
    allowed = [5, 60, 111, 300, 42]
    answer = greedy(baton, allowed_token_ids=allowed)
    assert len(answer.token_ids) == NEW_TOKENS
    assert set(answer.token_ids) <= set(allowed)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3, "logit_bias": {77: 5.0}}])
def test_logprobs_are_the_models_own(baton: BatonClient, oracle: Oracle, options: dict[str, Any]) -> None:
    """Log-probabilities are those before penalties and biases, on the prefill and the decode worker."""
    answer = greedy(baton, logprobs=5, **options)
    expected = oracle.logprobs(list(answer.token_ids))
    assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids) == NEW_TOKENS
    for row, token_id, told in zip(expected, answer.token_ids, answer.logprobs, strict=True):
        assert told.token_id == token_id
        assert told.logprob == pytest.approx(row[token_id].item(), abs=TOLERANCE)
        assert [each.logprob for each in told.top] == pytest.approx(row.topk(5).values.tolist(), abs=TOLERANCE)
        assert [row[each.token_id].item() for each in told.top] == pytest.approx(
            [each.logprob for each in told.top], abs=TOLERANCE
        )


def test_seeded_choices_are_reproduced(baton: BatonClient) -> None:
    options: dict[str, Any] = {
        "max_tokens": 16,
        "temperature": 1.0,
        "typical_p": 0.9,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "logprobs": 2,
        "n": 3,
        "seed": 7,
    }
    first, again = (baton.complete(PROMPT, **options) for _ in range(2))
    answers = [choice.token_ids for choice in first.choices]
    assert len(set(answers)) == 3
    assert [choice.token_ids for choice in again.choices] == answers
    assert all(choice.logprobs is not None and len(choice.logprobs) == 16 for choice in first.choices)
