"""Rows of a step whose answers have a form: which of them can be drawn from now, and what is left of their logits."""

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import torch

from engine.constraint import Banned, wait_for
from engine.distribution import Distribution
from engine.plan import Chunk, NonFinite, Sample
from structured.library import GrammarFailed

Undrawn = dict[int, NonFinite | None]
"""By row: why nothing is drawn from it. None: its mask is late."""


def ask_for_masks(chunks: Iterable[Chunk]) -> bool:
    """Has the masks of a step made, beside its forward pass. Returns whether there are any."""
    asked = False
    for chunk in chunks:
        for sample in chunk.samples:
            if sample.params.constraint is not None:
                _mask(sample)
                asked = True
    return asked


def settle(distributions: Sequence[Distribution], has_neighbours: bool, began_s: float) -> Undrawn:
    """Gives distributions whose answers have a form their masks, once there. `has_neighbours`: rows that need none.

    `began_s`: monotonic, of the step.
    """
    masks = [(each, mask) for each in distributions if (mask := _mask(each.sample)) is not None]
    undrawn: Undrawn = {}
    if not masks:
        return undrawn
    wait_for([mask for _, mask in masks], began_s, has_neighbours)
    for each, mask in masks:
        if not mask.done():
            undrawn[each.row] = None
            continue
        try:
            each.banned = mask.result()
        except GrammarFailed as error:
            undrawn[each.row] = NonFinite(f"the answer's form cannot be followed: {error}")
    return undrawn


def keep_formed(adjusted: torch.Tensor, logits: torch.Tensor, distributions: Sequence[Distribution]) -> None:
    """Bans, in place, what would leave a form. `adjusted` has a row for each; `logits` are as the model made them.

    Where other rules have banned all that the form allows, the form goes before them.
    """
    formed = [(place, each, each.banned) for place, each in enumerate(distributions) if each.banned is not None]
    if not formed:
        return
    places = [place for place, _, _ in formed]
    banned = torch.stack([_as_wide(mask, logits.shape[-1]) for _, _, mask in formed]).to(logits.device)
    kept = adjusted[places].masked_fill_(banned, -math.inf)
    for index, nothing in enumerate((kept.amax(-1) == -math.inf).tolist()):
        if nothing:
            kept[index] = logits[formed[index][1].row].masked_fill(banned[index], -math.inf)
    adjusted[places] = kept


def _mask(sample: Sample) -> "Future[Banned] | None":
    constraint = sample.params.constraint
    return None if constraint is None else constraint.mask(sample.choice, sample.history, sample.prompt_tokens)


def _as_wide(mask: Banned, vocabulary: int) -> torch.Tensor:
    """Logits may have more columns than there are tokens."""
    known = torch.from_numpy(mask)
    if len(mask) == vocabulary:
        return known
    wide = torch.ones(vocabulary, dtype=torch.bool)
    wide[: len(mask)] = known[:vocabulary]
    return wide
