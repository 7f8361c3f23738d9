"""One worker after the other, regardless of caches and load: the baseline of the other policies."""

from collections.abc import Sequence

from router.candidates import PlacementRequest, WorkerView
from router.policies.policy import Costs, Policy


class RoundRobin(Policy):
    def prefill_costs(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> Costs:
        turns = [(place - request.turn) % len(workers) for place in range(len(workers))]
        return Costs(turns, {"turns_away": turns})

    def decode_costs(
        self, request: PlacementRequest, workers: Sequence[WorkerView], prefill: WorkerView | None
    ) -> Costs:
        return self.prefill_costs(request, workers)
