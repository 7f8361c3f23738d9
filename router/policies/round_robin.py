"""One worker after the other, regardless of caches and load: the baseline of the other policies."""

from collections.abc import Sequence

from router.candidates import PlacementRequest, WorkerView
from router.policies.policy import Policy, Terms


class RoundRobin(Policy):
    def prefill_costs(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> Sequence[float]:
        return [(place - request.turn) % len(workers) for place in range(len(workers))]

    def prefill_terms(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> Sequence[Terms]:
        return [{"turns_away": turns} for turns in self.prefill_costs(request, workers)]

    def decode_costs(
        self, request: PlacementRequest, workers: Sequence[WorkerView], prefill: WorkerView | None
    ) -> Sequence[float]:
        return self.prefill_costs(request, workers)

    def decode_terms(
        self, request: PlacementRequest, workers: Sequence[WorkerView], prefill: WorkerView | None
    ) -> Sequence[Terms]:
        return self.prefill_terms(request, workers)
