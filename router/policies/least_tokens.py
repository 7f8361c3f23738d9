"""The worker with the fewest tokens in flight, less the cached tokens of the prompt."""

from collections.abc import Sequence
from operator import add

from router.candidates import PlacementRequest, WorkerView
from router.policies.policy import Costs, Policy


class LeastTokens(Policy):
    def prefill_costs(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> Costs:
        in_flight = [worker.tokens_in_flight for worker in workers]
        less_cached = [-request.hit_tokens(worker) for worker in workers]
        terms = {"tokens_in_flight": in_flight, "less_cached_tokens": less_cached}
        return Costs(list(map(add, in_flight, less_cached)), terms)

    def decode_costs(
        self, request: PlacementRequest, workers: Sequence[WorkerView], prefill: WorkerView | None
    ) -> Costs:
        return self.prefill_costs(request, workers)
