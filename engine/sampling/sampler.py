"""Tokens from logits, for a whole batch at once. A row's tokens do not depend on the rows beside it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from baton.engine.plan import Drawn, NonFinite, Sample
from baton.engine.sampling.constraint_rows import Distribution, put_form_first, settle
from baton.engine.sampling.filters import filtered, is_narrow, pick
from baton.engine.sampling.logprobs import described
from baton.engine.sampling.processors import adjust
from baton.engine.sampling.uniform import uniform
from baton.kernels.sampling import masked_rows, row_statistics, sample_tokens, samples_natively

# Elements of one float64 tensor of the filters, unless a single row is larger.
CPU_SCRATCH_ELEMENTS = 1 << 18  # 2 MiB: stays in the cache between one operation and the next
DEVICE_SCRATCH_ELEMENTS = 1 << 22  # 32 MiB: few launches, and little beside the KV pool


@dataclass(frozen=True, slots=True)
class Row:
    """The samples to draw from one row of logits; `position` is the absolute position of the drawn token."""

    samples: tuple[Sample, ...]
    position: int


RowResult = tuple[Drawn, ...] | NonFinite | None
"""One entry per sample of the row, in order; None where its mask was not ready in time."""


def sample(logits: torch.Tensor, rows: Sequence[Row], began_s: float = math.inf) -> list[RowResult]:
    """One result per row of `logits`, float32 `[rows, vocab]`. A row that is not finite spoils no other.

    `began_s`: when the step began, monotonic; answers that have a form may hold it up by a share of the time since.
    Raises: HistoryMissing for a sample whose scheduler left it out.
    """
    special = [each for index, row in enumerate(rows) for each in _distributions(index, row)]
    undrawn = settle(special, any(_draws_freely(row) for row in rows), began_s)
    alone = {each.row: each.allowed for each in special if _is_best_allowed(each, rows[each.row])}
    statistics = row_statistics(logits, [alone.get(index) for index in range(len(rows))] if alone else None)
    finite: list[bool] = statistics.finite.tolist()
    best = statistics.best.tolist()
    drawn = [[best[index]] * len(row.samples) if finite[index] else None for index, row in enumerate(rows)]
    if undrawn:
        undrawn = {index: why for index, why in undrawn.items() if finite[index]}
        for index in undrawn:
            drawn[index] = None
    special = [each for each in special if drawn[each.row] is not None and each.row not in alone]
    _draw(logits, special)
    for distribution in special:
        token_ids = drawn[distribution.row]
        if not distribution.token_ids:
            drawn[distribution.row] = None
        elif token_ids is not None:
            for place, token_id in zip(distribution.places, distribution.token_ids, strict=True):
                token_ids[place] = token_id
    results = _results(logits, statistics.log_totals, rows, drawn)
    return [undrawn.get(index, result) for index, result in enumerate(results)] if undrawn else results


def _is_best_allowed(distribution: Distribution, row: Row) -> bool:
    """Whether it is all that a row is for, and its token the likeliest that the form of the answer allows."""
    params = distribution.sample.params
    is_plain = params.greedy and not params.adjusts_logits
    return is_plain and distribution.allowed is not None and len(distribution.places) == len(row.samples)


def _draws_freely(row: Row) -> bool:
    return any(wanted.params.constraint is None for wanted in row.samples)


def _distributions(index: int, row: Row) -> Iterator[Distribution]:
    """Those of a row that the likeliest token does not answer. Samples of one kind stand next to each other."""
    current: Distribution | None = None
    for place, wanted in enumerate(row.samples):
        params = wanted.params
        if params.greedy and params.takes_any_token:
            continue
        if current is None or params is not current.sample.params or wanted.history is not current.sample.history:
            if current is not None:
                yield current
            current = Distribution(index, wanted)
        current.places.append(place)
        if not params.greedy:
            current.numbers.append(uniform(params.seed, wanted.choice, row.position))
    if current is not None:
        yield current


def _draw(logits: torch.Tensor, distributions: Sequence[Distribution]) -> None:
    """Fills in the tokens of all distributions: those that are filtered alike together, in bounded scratch memory."""
    elements = CPU_SCRATCH_ELEMENTS if logits.device.type == "cpu" else DEVICE_SCRATCH_ELEMENTS
    at_once = max(1, elements // logits.shape[-1])
    greedy = [each for each in distributions if each.sample.params.greedy]
    random = [each for each in distributions if not each.sample.params.greedy]
    narrow = [each for each in random if is_narrow(each.sample.params)]
    wide = [each for each in random if not is_narrow(each.sample.params)]
    for alike in (greedy, narrow, wide):
        for start in range(0, len(alike), at_once):
            _draw_alike(logits, alike[start : start + at_once])


def _draw_alike(logits: torch.Tensor, distributions: Sequence[Distribution]) -> None:
    adjusted = masked_rows(logits, [each.row for each in distributions], [each.allowed for each in distributions])
    adjust(adjusted, [each.sample for each in distributions])
    largest = adjusted.max(-1)
    alive = largest.values.isfinite().tolist()  # not if every token is banned, or a bias went beyond float32
    if not all(alive) and put_form_first(adjusted, logits, distributions, alive):
        largest = adjusted.max(-1)
        alive = largest.values.isfinite().tolist()
    if distributions[0].sample.params.greedy:
        for each, token_id, lives in zip(distributions, largest.indices.tolist(), alive, strict=True):
            each.token_ids = [token_id] * len(each.places) if lives else []
        return
    living = [each for each, lives in zip(distributions, alive, strict=True) if lives]
    if not living:
        return
    if len(living) < len(distributions):
        adjusted = adjusted[torch.tensor(alive, device=logits.device)]
    if samples_natively(adjusted) and all(each.sample.params.filters_by_rank_alone for each in living):
        _draw_natively(adjusted, living)
        return
    most = max(len(each.numbers) for each in living)
    numbers = [each.numbers + [0.0] * (most - len(each.numbers)) for each in living]
    candidates = filtered(adjusted, [each.sample.params for each in living])
    picked = pick(candidates, torch.tensor(numbers, dtype=torch.float64, device=logits.device))
    for each, token_ids in zip(living, picked.tolist(), strict=True):
        each.token_ids = token_ids[: len(each.numbers)]


def _draw_natively(adjusted: torch.Tensor, distributions: Sequence[Distribution]) -> None:
    """A row of `adjusted` for each; rows from which several tokens are drawn are repeated."""
    params = [each.sample.params for each in distributions for _ in each.places]
    if len(params) > len(distributions):
        counts = torch.tensor([len(each.places) for each in distributions])
        adjusted = adjusted.repeat_interleave(counts, dim=0)
    drawn = sample_tokens(
        adjusted,
        torch.tensor([each.temperature for each in params]),
        torch.tensor([each.top_k for each in params]),
        torch.tensor([each.top_p for each in params]),
        torch.tensor([number for each in distributions for number in each.numbers], dtype=torch.float64),
    )
    token_ids = iter(drawn.token_ids.tolist())
    for each in distributions:
        each.token_ids = [next(token_ids) for _ in each.places]


def _results(
    logits: torch.Tensor, log_totals: torch.Tensor, rows: Sequence[Row], drawn: Sequence[list[int] | None]
) -> list[RowResult]:
    of_rows = [index for index, token_ids in enumerate(drawn) for _ in token_ids or ()]
    token_ids = [token_id for of_row in drawn for token_id in of_row or ()]
    counts = [
        wanted.params.logprobs for row, of_row in zip(rows, drawn, strict=True) if of_row for wanted in row.samples
    ]
    results: Iterator[Drawn] = iter(described(logits, log_totals, of_rows, token_ids, counts))
    return [NonFinite() if of_row is None else tuple(next(results) for _ in of_row) for of_row in drawn]
