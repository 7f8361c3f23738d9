"""Draft tokens of simulated decode workers, with a given acceptance rate."""

import random
from collections.abc import Sequence
from functools import cached_property

from baton.lab.simulation.client import SimulatedRequest
from baton.lab.simulation.model import VOCABULARY, expected_answer

MOST_DRAFTED = 6  # maximum number of draft tokens per step


class SometimesRight:
    """`TextDrafter` that knows every answer of a world and replaces some of its tokens by wrong ones."""

    def __init__(self, draw: random.Random, requests: Sequence[SimulatedRequest], right: float) -> None:
        """Create a drafter. `right`: share of drafted tokens that match the answer."""
        self._draw = draw
        self._requests = requests
        self._right = right

    def draft(self, token_ids: Sequence[int], most: int) -> list[int]:
        begun = tuple(token_ids)
        known = next((each for each in self._answered if each[: len(begun)] == begun), ())
        following = known[len(begun) :][:most]
        return [each if self._draw.random() < self._right else self._draw.randrange(VOCABULARY) for each in following]

    @cached_property
    def _answered(self) -> list[tuple[int, ...]]:
        """Return the tokens of every prompt, followed by its answer."""
        return [
            (*request.asked.token_ids, *expected_answer(request.asked, choice).token_ids)
            for request in self._requests
            for choice in range(request.made)
        ]
