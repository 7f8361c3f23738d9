"""Rows of a step with structured output: which of them can be drawn from now, and their masks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from baton.engine.plan import Chunk, NonFinite, Sample
from baton.engine.sampling.constraint import Constraint, wait_for
from baton.engine.sampling.mask_threads import Allowed, Mask
from baton.engine.sampling.processors import HistoryMissing
from baton.generation.structured.library import GrammarFailed
from baton.kernels.sampling import masked_rows


@dataclass(slots=True)
class Distribution:
    """Samples of one row that are drawn from the same distribution: same parameters, same tokens before."""

    row: int
    sample: Sample  # one of them
    places: list[int] = field(default_factory=list)  # in the row's samples
    numbers: list[float] = field(default_factory=list)  # uniform in [0, 1), one per place; none if greedy
    token_ids: list[int] = field(default_factory=list)  # drawn, one per place; none if no token has any weight
    allowed: Allowed | None = None  # by the form of the answer, if it has one


Undrawn = dict[int, NonFinite | None]
"""By row: why nothing is drawn from it. None: its mask is late."""

Formed = tuple[Constraint, Sample]
"""A sample whose answer has a form, and that."""


def formed_samples(chunks: Iterable[Chunk]) -> list[Formed]:
    """Those of a step."""
    return [
        (constraint, sample)
        for chunk in chunks
        for sample in chunk.samples
        if (constraint := sample.params.constraint) is not None
    ]


def ask_for_masks(formed: Iterable[Formed]) -> None:
    """Has the masks of a step made, beside its forward pass.

    Asked for just before its layers: until the interpreter's lock is let go for long, the threads that make them could
    only take it away, at each of the calls by which the engine lets it go for a moment.
    """
    for constraint, sample in formed:
        constraint.mask(sample.choice, sample.history, sample.prompt_tokens)


def settle(distributions: Sequence[Distribution], has_neighbours: bool, began_s: float) -> Undrawn:
    """Gives distributions whose answers have a form their masks, once there. `has_neighbours`: rows that need none.

    `began_s`: monotonic, of the step. Raises: HistoryMissing.
    """
    undrawn: Undrawn = {}
    masks = [
        (each, _mask(constraint, each.sample))
        for each in distributions
        if (constraint := each.sample.params.constraint) is not None
    ]
    if not masks:
        return undrawn
    wait_for([mask for _, mask in masks], began_s, has_neighbours)
    for each, mask in masks:
        if not mask.is_ready:
            undrawn[each.row] = None
            continue
        try:
            each.allowed = mask.result()
        except GrammarFailed as error:
            undrawn[each.row] = NonFinite(f"the answer's form cannot be followed: {error}")
    return undrawn


def put_form_first(
    adjusted: torch.Tensor, logits: torch.Tensor, distributions: Sequence[Distribution], alive: Sequence[bool]
) -> bool:
    """Where other rules have banned all that a form allows, the form alone counts. Returns whether there are such rows.

    `logits` are as the model made them; `alive`: rows of `adjusted` that have a token left.
    """
    rows = [row for row, each in enumerate(distributions) if each.allowed is not None and not alive[row]]
    if rows:
        formed = [distributions[row] for row in rows]
        adjusted[rows] = masked_rows(logits, [each.row for each in formed], [each.allowed for each in formed])
    return bool(rows)


def _mask(constraint: Constraint, sample: Sample) -> Mask:
    if not sample.history:
        raise HistoryMissing("the form of an answer needs Sample.history")
    return constraint.mask(sample.choice, sample.history, sample.prompt_tokens)
