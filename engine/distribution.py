"""The distribution that one or several samples of a row are drawn from."""

from dataclasses import dataclass, field

from engine.mask_threads import Allowed
from engine.plan import Sample


@dataclass(slots=True)
class Distribution:
    """Samples of one row that are drawn from the same distribution: same parameters, same tokens before."""

    row: int
    sample: Sample  # one of them
    places: list[int] = field(default_factory=list)  # in the row's samples
    numbers: list[float] = field(default_factory=list)  # uniform in [0, 1), one per place; none if greedy
    token_ids: list[int] = field(default_factory=list)  # drawn, one per place; none if no token has any weight
    allowed: Allowed | None = None  # by the form of the answer, if it has one
