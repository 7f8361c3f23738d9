"""How a beam search goes, with every default already resolved."""

import enum
from dataclasses import dataclass


class BeamStop(enum.Enum):
    """When the search ends before max_tokens: once as many beams have ended as it is wide, and ..."""

    UNPROMISING = "unpromising"  # none of the running beams, if it ended now, would be better than the worst of those
    FULL = "full"  # at once
    NEVER = "never"  # none of the running beams can become better than the worst of those


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Raises ValueError, naming the field, for a value without meaning."""

    width: int
    length_penalty: float = 1.0  # above 0 favours long answers, since scores are negative
    stop: BeamStop = BeamStop.UNPROMISING

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError("beam_width must be at least 1")
        if not abs(self.length_penalty) <= MAX_LENGTH_PENALTY:
            raise ValueError(f"length_penalty must be within {MAX_LENGTH_PENALTY:g} of 0")


MAX_LENGTH_PENALTY = 10.0  # the length is raised to it


def candidates_per_beam(width: int, stop_token_ids: frozenset[int]) -> int:
    """How many of its likeliest tokens a step needs of each beam.

    The `width` best continuations of all beams are among them, and the `width` best that do not end, even where all
    stop tokens are among the likeliest.
    """
    return width + len(stop_token_ids)
