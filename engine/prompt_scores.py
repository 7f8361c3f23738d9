"""The log-probabilities of a prompt's tokens, a few rows of logits at a time."""

from collections.abc import Callable

import torch

from engine.logprobs import described
from engine.plan import Drawn, Scored
from kernels.survey_rows import survey_rows

ROWS_AT_ONCE = 64  # rows of [vocab] float32 logits that exist at one time, and as many log-probabilities


def prompt_scores(
    logits: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, scored: Scored
) -> tuple[Drawn, ...] | None:
    """One entry per token of `scored`: the one at index i stands in the place that row i of `hidden` predicts.

    `hidden` are the rows of one chunk, `[tokens, hidden size]`; `logits` makes float32 `[rows, vocab]` of some of them.
    None where those are not finite.
    """
    told: list[Drawn] = []
    for start in range(0, len(scored.token_ids), ROWS_AT_ONCE):
        token_ids = scored.token_ids[start : start + ROWS_AT_ONCE]
        rows = logits(hidden[start : start + len(token_ids)])
        surveyed = survey_rows(rows)
        if not bool(surveyed.finite.all()):
            return None
        places = range(len(token_ids))
        told += described(rows, surveyed.log_totals, places, token_ids, [scored.top] * len(token_ids))
    return tuple(told)
