"""A policy computes the cost of each candidate. The cheapest candidate is taken, equal ones in turn."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from router.candidates import PlacementRequest, WorkerView


class Costs(NamedTuple):
    """One number per worker, in the order of the workers. A total is the sum of the terms, which are kept to be shown:
    an explanation is what decided, and is not made anew.
    """

    totals: Sequence[float]
    terms: Mapping[str, Sequence[float]]  # by name, with the unit in the name; a term that is 0 for all may be left out


class Policy(Protocol):
    """`workers` are never empty. Costs of one call have one unit."""

    def prefill_costs(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> Costs:
        """Of computing the prompt there."""

    def decode_costs(
        self, request: PlacementRequest, workers: Sequence[WorkerView], prefill: WorkerView | None
    ) -> Costs:
        """Of making the answer there. `prefill` computes the prompt; None: the decode worker does."""

    def local_limit_ms(self, prefill_ms: float) -> float | None:
        """A decode worker that would have the first token sooner than this had better compute the prompt, where a
        prefill worker would have it after `prefill_ms`: never more than that. None: it had not.
        """
        return None


def cheapest(costs: Sequence[float], turn: int) -> int:
    """Its place. Equal ones take turns, so that none of them is left out."""
    least = min(costs)
    if costs.count(least) == 1:
        return costs.index(least)
    equal = [place for place, cost in enumerate(costs) if cost == least]
    return equal[turn % len(equal)]
