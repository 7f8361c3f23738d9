"""The likeliest tokens of each row, so that top-k, and logprobs of the top few, look at few tokens of a vocabulary."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

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
