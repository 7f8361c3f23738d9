"""Requests' changes of logits before temperature: bias, penalties, bans. Rows that ask for none are not touched."""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from baton.engine.plan import Sample


def penalise(logits: torch.Tensor, samples: Sequence[Sample]) -> None:
    """Changes `logits`, float32 `[len(samples), vocab]`, contiguous, in place: first repetition, then the two others.

    Repetition as in CTRL (arXiv 1909.05858) and transformers, over prompt and answer: positive logits are divided by
    the penalty, negative ones multiplied. Frequency and presence as OpenAI defines them, over the answer alone.
    """
    repeated = [row for row, sample in enumerate(samples) if sample.params.repetition_penalty != 1.0]
    if repeated:
        _penalise_repetition(logits, samples, repeated)
    counted = [
        row
        for row, sample in enumerate(samples)
        if (sample.params.presence_penalty or sample.params.frequency_penalty)
        and len(sample.history) > sample.prompt_tokens
    ]
    if counted:
        _penalise_counts(logits, samples, counted)


def _penalise_repetition(logits: torch.Tensor, samples: Sequence[Sample], rows: Sequence[int]) -> None:
    places = _places(logits, ((row, samples[row].history) for row in rows)).unique()
    penalty = _per_row(logits, [sample.params.repetition_penalty for sample in samples], places)
    flat = logits.view(-1)
    seen = flat[places]
    flat[places] = torch.where(seen < 0, seen * penalty, seen / penalty)


def _penalise_counts(logits: torch.Tensor, samples: Sequence[Sample], rows: Sequence[int]) -> None:
    answers = ((row, samples[row].history[samples[row].prompt_tokens :]) for row in rows)
    places, counts = _places(logits, answers).unique(return_counts=True)
    frequency = _per_row(logits, [sample.params.frequency_penalty for sample in samples], places)
    presence = _per_row(logits, [sample.params.presence_penalty for sample in samples], places)
    flat = logits.view(-1)
    flat[places] = flat[places] - frequency * counts - presence


def _places(logits: torch.Tensor, tokens: Iterable[tuple[int, Sequence[int]]]) -> torch.Tensor:
    """Where the tokens of each row lie in the flattened logits; tokens that the model cannot make are left out."""
    vocab_size = logits.shape[-1]
    places: list[torch.Tensor] = []
    for row, token_ids in tokens:
        ids = torch.tensor(token_ids, dtype=torch.int64)
        places.append(ids[(ids >= 0) & (ids < vocab_size)] + row * vocab_size)
    return torch.cat(places).to(logits.device)


def _per_row(logits: torch.Tensor, values: Sequence[float], places: torch.Tensor) -> torch.Tensor:
    """The value of the row that each place lies in."""
    return torch.tensor(values, dtype=logits.dtype, device=logits.device)[places // logits.shape[-1]]


class HistoryMissing(ValueError):
    """A request's sampling looks back at tokens that the scheduler did not hand over."""


def adjust(logits: torch.Tensor, samples: Sequence[Sample]) -> None:
    """Changes `logits`, float32 `[len(samples), vocab]`, contiguous, in place.

    In the order of transformers' generate: bias, penalties, bad words, min_tokens; at last allowed tokens. A row may
    end up without any token left. Raises: HistoryMissing.
    """
    if not any(sample.params.adjusts_logits for sample in samples):
        return
    for sample in samples:
        if sample.params.needs_history and not sample.history:
            raise HistoryMissing("penalties, min_tokens and longer bad words need Sample.history")
    _add_bias(logits, samples)
    penalise(logits, samples)
    _ban(logits, samples)
    _keep_allowed(logits, samples)


def _add_bias(logits: torch.Tensor, samples: Sequence[Sample]) -> None:
    vocab_size = logits.shape[-1]
    biases = {
        row * vocab_size + token_id: bias
        for row, sample in enumerate(samples)
        for token_id, bias in sample.params.logit_bias.items()
        if 0 <= token_id < vocab_size
    }
    if biases:
        places = torch.tensor(list(biases), device=logits.device)
        logits.view(-1)[places] += torch.tensor(list(biases.values()), dtype=logits.dtype, device=logits.device)


def _ban(logits: torch.Tensor, samples: Sequence[Sample]) -> None:
    vocab_size = logits.shape[-1]
    banned = [
        row * vocab_size + token_id
        for row, sample in enumerate(samples)
        if sample.params.bad_words or sample.params.min_tokens
        for token_id in banned_tokens(sample)
        if 0 <= token_id < vocab_size
    ]
    if banned:
        logits.view(-1)[torch.tensor(banned, device=logits.device)] = -math.inf


def banned_tokens(sample: Sample) -> Iterator[int]:
    """Tokens that would end the answer too early or complete a bad word.

    As in transformers a bad word may begin in the prompt, and a stop token alone is not one: the answer could not end.
    """
    params = sample.params
    if len(sample.history) - sample.prompt_tokens < params.min_tokens:
        yield from params.stop_token_ids
    for word in params.bad_words:
        start, last = word[:-1], word[-1]
        if not start:
            if last not in params.stop_token_ids:
                yield last
        elif tuple(sample.history[-len(start) :]) == start:
            yield last


def _keep_allowed(logits: torch.Tensor, samples: Sequence[Sample]) -> None:
    rows = [row for row, sample in enumerate(samples) if sample.params.allowed_token_ids is not None]
    if not rows:
        return
    vocab_size = logits.shape[-1]
    allowed = [
        index * vocab_size + token_id
        for index, row in enumerate(rows)
        for token_id in _existing(samples[row].params.allowed_token_ids or (), vocab_size)
    ]
    others = torch.ones(len(rows), vocab_size, dtype=torch.bool, device=logits.device)
    others.view(-1)[torch.tensor(allowed, dtype=torch.int64, device=logits.device)] = False
    logits[rows] = logits[rows].masked_fill(others, -math.inf)


def _existing(token_ids: Iterable[int], vocab_size: int) -> Iterator[int]:
    return (token_id for token_id in token_ids if 0 <= token_id < vocab_size)
