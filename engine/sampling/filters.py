"""Temperature, top-k, top-p, min-p, typical-p, over a batch. Order and meaning are those of transformers.

In float64, with sums taken one by one in order of id or of likelihood: padding of a row changes nothing.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from baton.engine.sampling.params import SamplingParams

SPARE_TOKENS = 8  # beyond those asked for; ties of more tokens than this cost a second search


class Likeliest(NamedTuple):
    """Tokens by ascending id; -inf fills up rows that have fewer than others."""

    token_ids: torch.Tensor  # int64 [rows, width]
    logits: torch.Tensor  # [rows, width]


def likeliest(logits: torch.Tensor, counts: Sequence[int]) -> Likeliest:
    """The `counts[row]` likeliest tokens of each row of `logits`, `[rows, vocab]`, and all that tie with the last."""
    vocab_size = logits.shape[-1]
    values, token_ids = logits.topk(min(max(counts) + SPARE_TOKENS, vocab_size))
    threshold = _kth(values, counts)
    if values.shape[-1] < vocab_size and bool((values[:, -1:] >= threshold).any()):
        values, token_ids = logits.topk(int((logits >= threshold).sum(-1).max()))
    ascending = token_ids.sort(-1)
    values = values.gather(-1, ascending.indices)
    return Likeliest(ascending.values, values.masked_fill(values < threshold, -math.inf))


def kth_largest(logits: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """The `counts[row]`-th largest of each row, `[rows, 1]`; the least finite number where fewer are finite."""
    return _kth(logits.topk(min(max(counts), logits.shape[-1])).values, counts)


def _kth(descending: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    places = torch.tensor(counts, device=descending.device).clamp(max=descending.shape[-1]) - 1
    return descending.gather(-1, places[:, None]).clamp(min=torch.finfo(descending.dtype).min)


NARROW_TOP_K = 1024  # up to here the filters after top-k look at those tokens alone, not at the vocabulary


class Candidates(NamedTuple):
    """Tokens by ascending id, among them all that the filters left; others have no weight."""

    token_ids: torch.Tensor  # int64 [rows, width]
    cumulative: torch.Tensor  # float64 [rows, width], unnormalised weights summed up


def is_narrow(params: SamplingParams) -> bool:
    """Rows that are filtered together are all narrow, or none is."""
    return 0 < params.top_k <= NARROW_TOP_K


def filtered(logits: torch.Tensor, params: Sequence[SamplingParams]) -> Candidates:
    """Candidates of each row of `logits`, float32 `[len(params), vocab]`, each with a finite maximum.

    No temperature is 0. Ties at the top-k boundary stay. The likeliest token always stays, except with typical-p.
    """
    vocab_size = logits.shape[-1]
    if all(is_narrow(each) for each in params):
        token_ids, kept_logits = likeliest(logits, [each.top_k for each in params])
    else:
        token_ids = torch.arange(vocab_size, device=logits.device).expand(len(params), vocab_size)
        kept_logits = _top_k(logits, params)
    scaled = kept_logits.double()  # a copy, from here on changed in place
    scaled -= scaled.amax(-1, keepdim=True)  # at most 0, so that no temperature overflows
    scaled /= _column(scaled, [each.temperature for each in params])
    _filter(scaled, [each.top_p for each in params], 1.0, _nucleus)
    _filter(scaled, [each.min_p for each in params], 0.0, lambda chosen, least: chosen >= least.log())
    _filter(scaled, [each.typical_p for each in params], 1.0, _typical)
    return Candidates(token_ids, scaled.exp_().cumsum_(-1))


def pick(candidates: Candidates, numbers: torch.Tensor) -> torch.Tensor:
    """For each of `numbers`, float64 `[rows, draws]` in [0, 1), the candidate whose share holds it, by order of id."""
    targets = numbers * candidates.cumulative[:, -1:]  # below the total: 1 - 2**-53 is too small to round up to it
    places = torch.searchsorted(candidates.cumulative, targets, right=True)
    return candidates.token_ids.gather(-1, places)


Kept = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _filter(scaled: torch.Tensor, values: Sequence[float], neutral: float, keeps: Kept) -> None:
    """Applies a filter in place, to the rows whose value is not the neutral one."""
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
    threshold[rows] = kth_largest(logits[rows], [params[row].top_k for row in rows])
    return logits.masked_fill(logits < threshold, -math.inf)


def _nucleus(scaled: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Which tokens make up the likeliest `top_p` of the mass; the likeliest always does."""
    ascending = scaled.sort(dim=-1, stable=True)
    below = ascending.values.exp().cumsum(-1)
    inside = below > (1.0 - top_p) * below[:, -1:]
    inside[:, -1] = True
    return torch.zeros_like(inside).scatter_(-1, ascending.indices, inside)


def _typical(scaled: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Which tokens make up `mass` of those whose information is closest to the entropy (arXiv 2202.00666)."""
    weights = scaled.exp()
    total = weights.cumsum(-1)[:, -1:]
    information = total.log() - scaled
    expected = (weights / total * information).nan_to_num(nan=0.0)  # 0 * inf where a token has no weight
    distance = (information - expected.cumsum(-1)[:, -1:]).abs()
    closest = distance.sort(dim=-1, stable=True)
    covered = weights.gather(-1, closest.indices).cumsum(-1)
    last = (covered < mass * total).sum(-1, keepdim=True).clamp(max=scaled.shape[-1] - 1)
    return distance <= closest.values.gather(-1, last)


def _column(like: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
