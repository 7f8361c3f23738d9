"""Changes of logits that requests ask for, and filters of the tokens that may be sampled.

Changes are bias, penalties and bans; rows without changes are not touched. Filters are temperature, top-k, top-p,
min-p and typical-p, computed for a batch in float64. They sum in order of token id or of likelihood, so that padding
changes no result.
The order and meaning of changes and filters are those of transformers.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from baton.engine.request import Sample
from baton.engine.sampling.params import SamplingParams


def penalise(logits: torch.Tensor, samples: Sequence[Sample]) -> None:
    """Apply repetition, then frequency and presence penalties to `logits`, float32 `[len(samples), vocab]`.

    The repetition penalty is that of CTRL (arXiv 1909.05858) and transformers, for tokens of prompt and answer:
    positive logits are divided by it, negative ones multiplied. Frequency and presence penalties are OpenAI's, for
    tokens of the answer alone.
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
    """Return the indexes of each row's tokens in the flattened logits, without tokens outside the vocabulary."""
    vocab_size = logits.shape[-1]
    places: list[torch.Tensor] = []
    for row, token_ids in tokens:
        ids = torch.tensor(token_ids, dtype=torch.int64)
        places.append(ids[(ids >= 0) & (ids < vocab_size)] + row * vocab_size)
    return torch.cat(places).to(logits.device)


def _per_row(logits: torch.Tensor, values: Sequence[float], places: torch.Tensor) -> torch.Tensor:
    """Return, for each of `places` (indexes in the flattened logits), the value of its row."""
    return torch.tensor(values, dtype=logits.dtype, device=logits.device)[places // logits.shape[-1]]


class HistoryMissing(ValueError):
    """The scheduler did not pass the tokens that a request's sampling needs."""


def adjust(logits: torch.Tensor, samples: Sequence[Sample]) -> None:
    """Apply all changes that requests ask for to `logits`, contiguous float32 `[len(samples), vocab]`, in place.

    The order is that of transformers' generate: bias, penalties, bad words, min_tokens; then allowed tokens. A row may
    be left without any allowed token. Raises: HistoryMissing.
    """
    for sample in samples:
        if sample.params.needs_history and not sample.history:
            raise HistoryMissing("penalties, min_tokens and multi-token bad words need Sample.history")
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
    """Yield tokens that would end the answer too early or complete a bad word.

    As in transformers, a bad word may begin in the prompt. A bad word that is a single stop token is ignored, since
    otherwise the answer could not end.
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


SPARE_TOKENS = 8  # tokens searched beyond the requested number; more ties than that need a second search


class Likeliest(NamedTuple):
    """Most likely tokens of each row, by ascending id; unused entries have the logit -inf."""

    token_ids: torch.Tensor  # int64 [rows, width]
    logits: torch.Tensor  # [rows, width]


def likeliest(logits: torch.Tensor, counts: Sequence[int]) -> Likeliest:
    """Return, for each row of `logits` `[rows, vocab]`, the `counts[row]` most likely tokens, and all that tie with the
    last of them.
    """
    vocab_size = logits.shape[-1]
    values, token_ids = logits.topk(min(max(counts) + SPARE_TOKENS, vocab_size))
    threshold = _kth(values, counts)
    if values.shape[-1] < vocab_size and bool((values[:, -1:] >= threshold).any()):
        values, token_ids = logits.topk(int((logits >= threshold).sum(-1).max()))
    ascending = token_ids.sort(-1)
    values = values.gather(-1, ascending.indices)
    return Likeliest(ascending.values, values.masked_fill(values < threshold, -math.inf))


def _kth(descending: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return the `counts[row]`-th largest value of each row, `[rows, 1]`, but at least the lowest finite number."""
    places = torch.tensor(counts, device=descending.device).clamp(max=descending.shape[-1]) - 1
    return descending.gather(-1, places[:, None]).clamp(min=torch.finfo(descending.dtype).min)


class Candidates(NamedTuple):
    """Tokens of each row by ascending id. All that pass the filters are included; tokens that fail have weight 0."""

    token_ids: torch.Tensor  # int64 [rows, width]
    cumulative: torch.Tensor  # float64 [rows, width], running sum of unnormalised weights


def filtered(logits: torch.Tensor, params: Sequence[SamplingParams]) -> Candidates:
    """Return the tokens of each row of `logits`, float32 `[len(params), vocab]`, that pass the filters of its `params`.

    Each row must have a finite maximum, and no temperature may be 0. Ties at the top-k boundary pass. The most likely
    token always passes, except with typical-p.
    """
    vocab_size = logits.shape[-1]
    if all(each.is_narrow for each in params):
        token_ids, kept_logits = likeliest(logits, [each.top_k for each in params])
    else:
        token_ids = torch.arange(vocab_size, device=logits.device).expand(len(params), vocab_size)
        kept_logits = _top_k(logits, params)
    scaled = kept_logits.double()  # copy, changed in place below
    scaled -= scaled.amax(-1, keepdim=True)  # values of at most 0, so that exp does not overflow at any temperature
    scaled /= _column(scaled, [each.temperature for each in params])
    _filter(scaled, [each.top_p for each in params], 1.0, _nucleus)
    _filter(scaled, [each.min_p for each in params], 0.0, lambda chosen, least: chosen >= least.log())
    _filter(scaled, [each.typical_p for each in params], 1.0, _typical)
    return Candidates(token_ids, scaled.exp_().cumsum_(-1))


def pick(candidates: Candidates, numbers: torch.Tensor) -> torch.Tensor:
    """Sample candidates by weight. `numbers`: random numbers in [0, 1), float64 `[rows, draws]`."""
    targets = numbers * candidates.cumulative[:, -1:]  # below the total weight, even for 1 - 2**-53
    places = torch.searchsorted(candidates.cumulative, targets, right=True)
    return candidates.token_ids.gather(-1, places)


Kept = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _filter(scaled: torch.Tensor, values: Sequence[float], neutral: float, keeps: Kept) -> None:
    """Apply a filter in place to the rows whose value is not neutral."""
    rows = [row for row, value in enumerate(values) if value != neutral]
    if not rows:
        return
    chosen = scaled if len(rows) == len(values) else scaled[rows]
    chosen.masked_fill_(~keeps(chosen, _column(scaled, [values[row] for row in rows])), -math.inf)
    if chosen is not scaled:
        scaled[rows] = chosen


def _top_k(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    rows = [row for row, each in enumerate(params) if 0 < each.top_k < logits.shape[-1]]
    if not rows:
        return logits
    threshold = torch.full_like(logits[:, :1], -math.inf)
    counts = [params[row].top_k for row in rows]
    threshold[rows] = _kth(logits[rows].topk(max(counts)).values, counts)
    return logits.masked_fill(logits < threshold, -math.inf)


def _nucleus(scaled: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Select the most likely tokens that together have the probability `top_p`, at least one (top-p)."""
    ascending = scaled.sort(dim=-1, stable=True)
    below = ascending.values.exp().cumsum(-1)
    inside = below > (1.0 - top_p) * below[:, -1:]
    inside[:, -1] = True
    return torch.zeros_like(inside).scatter_(-1, ascending.indices, inside)


def _typical(scaled: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Select tokens of total probability `mass` whose information is closest to the entropy (arXiv 2202.00666)."""
    weights = scaled.exp()
    total = weights.cumsum(-1)[:, -1:]
    information = total.log() - scaled
    expected = (weights / total * information).nan_to_num(nan=0.0)  # 0 * inf is NaN for tokens of weight 0
    distance = (information - expected.cumsum(-1)[:, -1:]).abs()
    closest = distance.sort(dim=-1, stable=True)
    covered = weights.gather(-1, closest.indices).cumsum(-1)
    last = (covered < mass * total).sum(-1, keepdim=True).clamp(max=scaled.shape[-1] - 1)
    return distance <= closest.values.gather(-1, last)


def _column(like: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
