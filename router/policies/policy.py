"""What a policy is: what each candidate would cost. Whoever costs least is taken, equal ones in turn."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from router.candidates import PlacementRequest, WorkerView

Terms = Mapping[str, float]
"""What a cost is the sum of, by name, units in the names."""


class Policy(Protocol):
    """One result per worker, in their order. `workers` are never empty. Costs of one call have one unit.

    Terms are for whoever asks why: costs are computed for every request, without them.
    """

    def prefill_costs(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> Sequence[float]:
        """Of computing the prompt there."""

    def prefill_terms(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> Sequence[Terms]: ...

    def decode_costs(
        self, request: PlacementRequest, workers: Sequence[WorkerView], prefill: WorkerView | None
    ) -> Sequence[float]:
        """Of making the answer there. `prefill` computes the prompt; None: the decode worker does."""

    def decode_terms(
        self, request: PlacementRequest, workers: Sequence[WorkerView], prefill: WorkerView | None
    ) -> Sequence[Terms]: ...

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
