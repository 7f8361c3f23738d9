"""The model's own log-probabilities of tokens, drawn or of the prompt: before penalties, temperature and filters."""

from collections.abc import Callable, Sequence

import torch

from baton.engine.plan import Drawn, Scored, TokenLogprob
from baton.engine.sampling.filters import likeliest
from baton.kernels.sampling import row_statistics


def described(
    logits: torch.Tensor,
    log_totals: torch.Tensor,
    rows: Sequence[int],
    token_ids: Sequence[int],
    counts: Sequence[int],
) -> list[Drawn]:
    """Each token with its log-probability in its row of `logits`, float32 `[rows, vocab]`, and the `counts` likeliest.

    `log_totals`: as in kernels/sampling.py, `[rows]`.
    Several tokens may be of one row, some rows of none. Scores a prompt as well: the token at position p + 1 belongs
    to the row of position p.
    """
    if not rows:
        return []
    of_rows = torch.tensor(rows, device=logits.device)
    chosen = logits[of_rows, torch.tensor(token_ids, device=logits.device)]
    of_tokens = (chosen - log_totals[of_rows]).tolist()
    most: dict[int, int] = {}
    for row, count in zip(rows, counts, strict=True):
        if count:
            most[row] = max(count, most.get(row, 0))
    top = dict(zip(most, _top(logits, log_totals, most), strict=True)) if most else {}
    return [
        Drawn(token_id, logprob, top[row][:count] if count else ())
        for row, token_id, logprob, count in zip(rows, token_ids, of_tokens, counts, strict=True)
    ]


def _top(logits: torch.Tensor, log_totals: torch.Tensor, most: dict[int, int]) -> list[tuple[TokenLogprob, ...]]:
    """The likeliest tokens of some rows, by logit and then by id, `most` of each."""
    rows = list(most)
    found = likeliest(logits[rows], list(most.values()))
    width = min(max(most.values()), logits.shape[-1])
    order = found.logits.sort(dim=-1, descending=True, stable=True).indices[:, :width]
    token_ids = found.token_ids.gather(-1, order)
    values = found.logits.gather(-1, order) - log_totals[rows][:, None]
    return [
        tuple(TokenLogprob(*pair) for pair in list(zip(ids, of_row, strict=True))[:count])
        for ids, of_row, count in zip(token_ids.tolist(), values.tolist(), most.values(), strict=True)
    ]


ROWS_AT_ONCE = 64  # rows of [vocab] float32 logits that exist at one time, and as many log-probabilities


def prompt_scores(
    logits: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, scored: Scored
) -> tuple[Drawn, ...] | None:
    """One entry per token of `scored`: the one at index i stands in the place that row i of `hidden` predicts.

    `hidden` are the rows of one chunk, `[tokens, hidden size]`; `logits` makes float32 `[rows, vocab]` of some of them.
    None where those are not finite.
    """
    scores: list[Drawn] = []
    for start in range(0, len(scored.token_ids), ROWS_AT_ONCE):
        token_ids = scored.token_ids[start : start + ROWS_AT_ONCE]
        rows = logits(hidden[start : start + len(token_ids)])
        statistics = row_statistics(rows)
        if not bool(statistics.finite.all()):
            return None
        places = range(len(token_ids))
        scores += described(rows, statistics.log_totals, places, token_ids, [scored.top] * len(token_ids))
    return tuple(scores)
