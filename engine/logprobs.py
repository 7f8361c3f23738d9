"""What the model itself made of tokens: log-probabilities before penalties, temperature and filters."""

from collections.abc import Sequence

import torch

from engine.likeliest import likeliest
from engine.plan import Drawn, TokenLogprob


def described(
    logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], counts: Sequence[int]
) -> list[Drawn]:
    """Each token with its log-probability in its row of `logits`, float32 `[rows, vocab]`, and the `counts` likeliest.

    Several tokens may be of one row, some rows of none. Scores a prompt as well: the token at position p + 1 belongs
    to the row of position p.
    """
    logprobs = logits.log_softmax(-1)
    of_tokens = logprobs[list(rows), list(token_ids)].tolist()
    most: dict[int, int] = {}
    for row, count in zip(rows, counts, strict=True):
        if count:
            most[row] = max(count, most.get(row, 0))
    top = dict(zip(most, _top(logits, logprobs, most), strict=True)) if most else {}
    return [
        Drawn(token_id, logprob, top[row][:count] if count else ())
        for row, token_id, logprob, count in zip(rows, token_ids, of_tokens, counts, strict=True)
    ]


def _top(logits: torch.Tensor, logprobs: torch.Tensor, most: dict[int, int]) -> list[tuple[TokenLogprob, ...]]:
    """The likeliest tokens of some rows, by logit and then by id, as many as `most` says for each."""
    rows = list(most)
    found = likeliest(logits[rows], list(most.values()))
    width = min(max(most.values()), logits.shape[-1])
    order = found.logits.sort(dim=-1, descending=True, stable=True).indices[:, :width]
    token_ids = found.token_ids.gather(-1, order)
    values = logprobs[rows].gather(-1, token_ids)
    return [
        tuple(TokenLogprob(*pair) for pair in list(zip(ids, of_row, strict=True))[:count])
        for ids, of_row, count in zip(token_ids.tolist(), values.tolist(), most.values(), strict=True)
    ]
