"""What was weighed when a request was placed: the terms of every candidate, made again from what the placement saw.

Nothing is kept for it while requests are placed; it costs only whoever asks.
"""

from collections.abc import Mapping, Sequence

from router.candidates import PlacementRequest, WorkerView
from router.placement import POLICIES, Placement, Strategy, those_with_credit
from router.policies.policy import Terms
from router.worker import WorkerRole


def weighed_terms(
    request: PlacementRequest, workers: Sequence[WorkerView], placement: Placement
) -> dict[str, Mapping[str, float]]:
    """By endpoint, of those that could be chosen: named terms, and `cost`, of which the lowest was taken.

    Costs of prefill and of decode workers are not compared with each other.
    """
    if placement.policy not in {each.value for each in Strategy}:
        return {}  # nothing was weighed: an adopted answer stays where it is
    policy = POLICIES[Strategy(placement.policy)]
    suited = [worker for worker in workers if request.suits(worker)]
    prefill = [worker for worker in suited if worker.role is WorkerRole.PREFILL]
    prefill = [worker for worker in prefill if worker.endpoint not in request.avoided_prefill] or prefill
    decode = those_with_credit([worker for worker in suited if worker.role is WorkerRole.DECODE], request)
    computing = next((worker for worker in prefill if worker.endpoint == placement.prefill), None)
    terms = _named(prefill, policy.prefill_terms(request, prefill) if prefill else ())
    return terms | _named(decode, policy.decode_terms(request, decode, computing) if decode else ())


def _named(workers: Sequence[WorkerView], terms: Sequence[Terms]) -> dict[str, Mapping[str, float]]:
    return {worker.endpoint: {**each, "cost": sum(each.values())} for worker, each in zip(workers, terms, strict=True)}
