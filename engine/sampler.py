"""Tokens from logits. Order and meaning of the filters are those of transformers: temperature, top-k, top-p, min-p."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.plan import ChunkResult, Drawn, NonFinite, Sample
from engine.sampling_params import SamplingParams
from engine.uniform import uniform


@dataclass(frozen=True, slots=True)
class Row:
    """What to draw from one row of logits; `position` is the absolute position of the drawn token."""

    samples: tuple[Sample, ...]
    position: int


class Candidates(NamedTuple):
    """Tokens that the filters left, by ascending id."""

    token_ids: torch.Tensor  # int64 [candidates]
    cumulative: torch.Tensor  # float64 [candidates], unnormalised weights summed up


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[ChunkResult]:
    """One result per row of `logits`, float32 `[rows, vocab]`. A row that is not finite spoils no other."""
    finite = torch.isfinite(logits).all(-1).tolist()
    normaliser = logits.logsumexp(-1)
    best = logits.argmax(-1)
    best_logprobs = (logits.gather(1, best[:, None])[:, 0] - normaliser).tolist()
    best_ids = best.tolist()

    results: list[ChunkResult] = []
    for index, row in enumerate(rows):
        if not finite[index]:
            results.append(NonFinite())
            continue
        candidates: dict[SamplingParams, Candidates] = {}
        drawn: list[Drawn] = []
        for wanted in row.samples:
            if wanted.params.greedy:
                drawn.append(Drawn(best_ids[index], best_logprobs[index]))
                continue
            if wanted.params not in candidates:
                candidates[wanted.params] = filtered(logits[index], wanted.params)
            number = uniform(wanted.params.seed, wanted.choice, row.position)
            token_id = pick(candidates[wanted.params], number)
            drawn.append(Drawn(token_id, float(logits[index, token_id] - normaliser[index])))
        results.append(tuple(drawn))
    return results


def filtered(logits: torch.Tensor, params: SamplingParams) -> Candidates:
    """Candidates of one row, float32 `[vocab]`, all finite; temperature is not 0. Ties at the top-k boundary stay."""
    if 0 < params.top_k < len(logits):
        threshold = logits.topk(params.top_k).values[-1]
        token_ids = torch.nonzero(logits >= threshold)[:, 0]
    else:
        token_ids = torch.arange(len(logits), device=logits.device)
    wide = logits[token_ids].double()
    scaled = (wide - wide.max()) / params.temperature  # at most 0, so that no temperature overflows
    if params.top_p < 1.0:
        kept = _nucleus(scaled, params.top_p)
        token_ids, scaled = token_ids[kept], scaled[kept]
    if params.min_p > 0.0:
        kept = scaled >= math.log(params.min_p)
        token_ids, scaled = token_ids[kept], scaled[kept]
    return Candidates(token_ids, scaled.exp().cumsum(0))


def _nucleus(scaled: torch.Tensor, top_p: float) -> torch.Tensor:
    """Which tokens make up the likeliest `top_p` of the mass, bool like `scaled`; the likeliest always does."""
    ascending = scaled.sort(stable=True)
    below = ascending.values.softmax(0).cumsum(0)
    outside = below <= 1.0 - top_p
    outside[-1] = False
    return torch.ones_like(scaled, dtype=torch.bool).scatter_(0, ascending.indices, ~outside)


def pick(candidates: Candidates, number: float) -> int:
    """The candidate whose share of [0, 1) holds `number`: inverse of the cumulative distribution, in order of id."""
    total = float(candidates.cumulative[-1])
    target = min(number * total, math.nextafter(total, 0.0))  # rounding up to the total would find nobody
    index = torch.searchsorted(candidates.cumulative, target, right=True)
    return int(candidates.token_ids[index])
