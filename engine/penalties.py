"""Penalties on tokens that were there before. They touch only those tokens, of only the rows that ask for it."""

from collections.abc import Iterable, Sequence

import torch

from engine.plan import Sample


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
