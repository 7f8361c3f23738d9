"""The worker with the fewest tokens in flight, less the cached tokens of the prompt."""

from collections.abc import Sequence

from router.candidates import PlacementRequest, WorkerView
from router.policies.policy import Policy, Terms


class LeastTokens(Policy):
    def prefill_costs(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> Sequence[float]:
        return [worker.tokens_in_flight - request.hit_tokens(worker) for worker in workers]

    def prefill_terms(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> Sequence[Terms]:
        return [
            {"tokens_in_flight": worker.tokens_in_flight, "less_cached_tokens": -request.hit_tokens(worker)}
            for worker in workers
        ]

    def decode_costs(
        self, request: PlacementRequest, workers: Sequence[WorkerView], prefill: WorkerView | None
    ) -> Sequence[float]:
        return self.prefill_costs(request, workers)

    def decode_terms(
        self, request: PlacementRequest, workers: Sequence[WorkerView], prefill: WorkerView | None
    ) -> Sequence[Terms]:
        return self.prefill_terms(request, workers)
