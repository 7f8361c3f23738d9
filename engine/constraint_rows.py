"""Rows of a step whose answers have a form: which of them can be drawn from now, and what is left of their logits."""

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import numpy
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


def keep_formed(adjusted: torch.Tensor, distributions: Sequence[Distribution]) -> None:
    """Bans, in place, what would leave a form. `adjusted`: float32 [len(distributions), vocab]."""
    formed = [(place, each.banned) for place, each in enumerate(distributions) if each.banned is not None]
    if not formed:
        return
    if adjusted.device.type == "cpu":
        rows = adjusted.numpy()
        for place, banned in formed:
            numpy.putmask(rows[place, : len(banned)], banned, -math.inf)
            rows[place, len(banned) :] = -math.inf  # logits may have more columns than there are tokens
        return
    wide = numpy.ones((len(formed), adjusted.shape[-1]), numpy.bool_)
    for row, (_, banned) in zip(wide, formed, strict=True):
        row[: len(banned)] = banned
    places = [place for place, _ in formed]
    adjusted[places] = adjusted[places].masked_fill_(torch.from_numpy(wide).to(adjusted.device), -math.inf)


def put_form_first(
    adjusted: torch.Tensor, logits: torch.Tensor, distributions: Sequence[Distribution], alive: Sequence[bool]
) -> bool:
    """Where other rules have banned all that a form allows, the form alone counts. Returns whether there are such rows.

    `logits` are as the model made them; `alive`: rows of `adjusted` that have a token left.
    """
    places = [place for place, each in enumerate(distributions) if each.banned is not None and not alive[place]]
    for place in places:
        adjusted[place] = logits[distributions[place].row]
        keep_formed(adjusted[place : place + 1], [distributions[place]])
    return bool(places)


def _mask(sample: Sample) -> "Future[Banned] | None":
    constraint = sample.params.constraint
    return None if constraint is None else constraint.mask(sample.choice, sample.history, sample.prompt_tokens)
