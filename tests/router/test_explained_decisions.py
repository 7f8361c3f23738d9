"""What an explanation calls cheapest was taken, for every policy: in random clusters, in retries, with pairs that are
set aside, a preferred decode worker, exhausted credit and short suffixes.
"""

from collections import Counter
from random import Random

import pytest

from baton.process.registry.worker_record import WorkerRole
from baton.protos import admin_pb2, session_pb2
from baton.router.placement.decide import Decision, NoPrefillWorker, PlacementPolicy, decide, placement_of
from baton.router.placement.policies import Strategy
from baton.router.trace.record import AttemptNote, Timeline
from baton.router.types.placement import PlacementRequest, WorkerView
from tests.fixtures.router_defaults import make_policy
from tests.fixtures.stalled import KeptExplainer, reported
from tests.router.plain_placement import has_room
from tests.router.random_clusters import has_model, random_request, random_worker

CASES = 1000  # of each policy
CREDIT = ("pool", "slot", "credit for")  # words of exclusions for the lack of it
ROLES = {WorkerRole.PREFILL: session_pb2.ROLE_PREFILL, WorkerRole.DECODE: session_pb2.ROLE_DECODE}


def explained(request: PlacementRequest, decision: Decision, policy: PlacementPolicy) -> admin_pb2.ExplainedAttempt:
    timeline, explainer = Timeline(0.0), KeptExplainer()
    note = AttemptNote(request, placement_of(request, decision, policy), decision, 0.0, 0.0)
    timeline.begin_attempt(note, 0.0)
    explainer.observe(reported(timeline))
    return explainer.explain("r").attempts[0]


def random_case(chance: Random, strategy: Strategy) -> tuple[PlacementRequest, list[WorkerView], PlacementPolicy]:
    workers = [random_worker(chance, number) for number in range(chance.randrange(2, 12))]
    policy = make_policy(
        chance.choice([NoPrefillWorker.LOCAL, *NoPrefillWorker]), chance.choice([0, 64, 1000]), strategy
    )
    return random_request(chance), workers, policy


def kinds_of(request: PlacementRequest, decision: Decision, workers: list[WorkerView]) -> list[str]:
    """What a decision is an example of."""
    decode = decision.decode
    possible = [each for each in decision.suited if each.role is WorkerRole.DECODE]
    narrowed = len(decode.workers) < sum(has_room(request, each) for each in possible)
    kinds = {
        str(decision.local): decision.local is not None,
        "without credit": not all(has_room(request, each) for each in possible),
        "preferred": narrowed and decode.worker.endpoint == request.preferred_decode,
        "broken_pairs": narrowed and bool(request.broken_pairs),
        "larger than the pool": request.charged_blocks > decode.worker.limit_blocks,
        "retried": bool(request.avoided_prefill & {each.endpoint for each in workers}),
        "session": request.session is not None,
    }
    return [kind for kind, holds in kinds.items() if holds]


@pytest.mark.parametrize("strategy", Strategy)
def test_worker_explained_as_cheapest_was_chosen(strategy: Strategy) -> None:
    seen: Counter[str] = Counter()
    for case in range(CASES):
        request, workers, policy = random_case(Random(f"{strategy} {case}"), strategy)
        decision = decide(request, workers, policy)
        if not isinstance(decision, Decision):
            continue
        seen.update(kinds_of(request, decision, workers))
        told = explained(request, decision, policy)
        assert [each.endpoint for each in told.candidates] == [each.endpoint for each in workers], case
        taken = placement_of(request, decision, policy).endpoints
        assert {each.endpoint for each in told.candidates if each.chosen} == set(taken), case
        for role in ROLES.values():
            alike = [each for each in told.candidates if each.role == role]
            costs = [each.terms["cost"] for each in alike if "cost" in each.terms]
            for each in alike:
                assert bool(each.excluded) is ("cost" not in each.terms), f"case {case}: {each}"
                assert not each.chosen or each.terms["cost"] == min(costs), f"case {case}: {each}"
                if "cost" in each.terms:
                    assert each.terms["cost"] == pytest.approx(sum(each.terms[name] for name in each.cost_terms))
            orders = {tuple(each.cost_terms) for each in alike if "cost" in each.terms}
            assert len(orders) <= 1, f"case {case}: {orders}"
        for view, each in zip(workers, told.candidates, strict=True):
            if view.role is WorkerRole.DECODE and has_model(request, view):
                lacking = any(word in each.excluded for word in CREDIT)
                assert lacking is not has_room(request, view), f"case {case}: {each}"
    expected = [
        "short_suffix",
        "prefill_workers_failed",
        "no_prefill_worker",
        "without credit",
        "preferred",
        "broken_pairs",
    ]
    expected += ["larger than the pool", "retried", "session"]
    expected += ["prefill_workers_busy"] if strategy is Strategy.CACHE_AWARE else []
    assert all(seen[kind] for kind in expected), seen


def test_explanation_keeps_the_decision_of_its_time() -> None:
    request, workers, policy = random_case(Random("cost 1"), Strategy.CACHE_AWARE)
    decision = decide(request, workers, policy)
    assert isinstance(decision, Decision)
    costs = [dict(each.terms).get("cost") for each in explained(request, decision, policy).candidates]
    for view in workers:
        view.tokens_in_flight += 100_000
        view.hit_blocks = 0
    assert [dict(each.terms).get("cost") for each in explained(request, decision, policy).candidates] == costs
    assert any(cost is not None for cost in costs)


def test_only_chosen_and_first_workers_of_very_many_are_kept() -> None:
    chance = Random(5)
    workers = [random_worker(chance, number) for number in range(300)]
    request = PlacementRequest(workers[0].fingerprint, 32, 321, 100, 1)
    decision = decide(request, workers, make_policy(strategy=Strategy.CACHE_AWARE))
    assert isinstance(decision, Decision) and decision.prefill is not None
    kept = decision.kept(20)
    assert kept.prefill is not None and len(kept.workers) == 20
    for whole, part in ((decision.prefill, kept.prefill), (decision.decode, kept.decode)):
        assert part.worker is whole.worker and part.worker in part.workers
        assert part.totals() == {name: whole.totals()[name] for name in part.totals()}
        assert part.terms() == {name: whole.terms()[name] for name in part.terms()}
    assert decision.kept(300) is decision
