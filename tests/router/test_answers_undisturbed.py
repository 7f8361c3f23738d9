"""Answers are not disturbed without need: when a decode worker with answers is given a prompt to compute."""

from dataclasses import replace
from random import Random

import pytest

from baton.process.registry.worker_record import WorkerRole
from baton.router.placement.decide import LocalPrefill, NoPrefillWorker, Placement, place
from baton.router.placement.policies import Strategy
from baton.router.types.placement import PlacementRequest, WorkerRates, WorkerView
from tests.fixtures.router_defaults import make_policy
from tests.router.plain_placement import exposed_load_ms, had_tokens, has_room, is_idle, prompt_rate
from tests.router.random_clusters import F, has_model, random_request, random_worker

CASES = 1200
REQUEST = PlacementRequest(fingerprint=F, block_tokens=32, prompt_tokens=3201, max_tokens=100, choices=1)
SLOW = WorkerRates(prefill_tokens_per_s=1000.0)
PREFILL = WorkerView("p0", WorkerRole.PREFILL, F, 10_000, 0, 0, 0, rates=SLOW)
DECODE = WorkerView("d0", WorkerRole.DECODE, F, 10_000, 64, 10_000, 64, rates=SLOW)
BUSY = replace(PREFILL, tokens_in_flight=20_000)  # 23 s
ANSWERING = replace(DECODE, tokens_in_flight=1000, used_slots=4)


def placed(*workers: WorkerView, request: PlacementRequest = REQUEST, local_tokens: int = 64) -> Placement:
    policy = make_policy(NoPrefillWorker.LOCAL, local_tokens, Strategy.CACHE_AWARE)
    outcome = place(request, workers, policy)
    assert isinstance(outcome, Placement)
    return outcome


def first_token_ms(request: PlacementRequest, worker: WorkerView) -> float:
    """From what is before the prompt, and what of it is neither cached there nor loaded from files."""
    before = worker.tokens_in_flight if worker.role is WorkerRole.PREFILL else worker.pending_prompt_tokens
    wait_ms = 1e3 * before / prompt_rate(worker, request)
    compute_ms = 1e3 * (request.prompt_tokens - had_tokens(request, worker)) / prompt_rate(worker, request)
    return wait_ms + compute_ms + exposed_load_ms(request, worker, wait_ms)


def could_compute(request: PlacementRequest, workers: list[WorkerView]) -> list[WorkerView]:
    """The prefill workers that have not failed this request, alone or with every decode worker that has room."""
    suited = [worker for worker in workers if worker.role is WorkerRole.DECODE and has_model(request, worker)]
    decode = [worker.endpoint for worker in suited if has_room(request, worker)]
    return [
        worker
        for worker in workers
        if worker.role is WorkerRole.PREFILL
        and has_model(request, worker)
        and worker.endpoint not in request.avoided_prefill
        and any((worker.endpoint, other) not in request.broken_pairs for other in decode)
    ]


@pytest.mark.parametrize("strategy", Strategy)
def test_decode_worker_with_answers_gets_a_prompt_only_if_nobody_is_sooner(strategy: Strategy) -> None:
    reasons = set[LocalPrefill | None]()
    for case in range(CASES):
        chance = Random(f"{strategy} {case}")
        workers = [random_worker(chance, number) for number in range(chance.randrange(2, 12))]
        request = replace(random_request(chance), prefix=chance.choice([b"", b"some prompts"]))
        policy = make_policy(chance.choice(list(NoPrefillWorker)), chance.choice([0, 64, 1000]), strategy)
        outcome = place(request, workers, policy)
        if not isinstance(outcome, Placement) or outcome.prefill is not None:
            continue
        decode = next(worker for worker in workers if worker.endpoint == outcome.decode)
        others = could_compute(request, workers)
        if not is_idle(decode) and others:
            soonest_ms = min(first_token_ms(request, worker) for worker in others)
            assert first_token_ms(request, decode) <= soonest_ms + 1e-6, f"{strategy} {case}: {request} {workers}"
            reasons.add(outcome.local_prefill)
    assert LocalPrefill.SHORT_SUFFIX in reasons
    assert (LocalPrefill.PREFILL_WORKERS_BUSY in reasons) is (strategy is Strategy.CACHE_AWARE)


@pytest.mark.parametrize(
    ("decode", "local"),
    [(DECODE, True), (ANSWERING, False), (replace(ANSWERING, rates=replace(SLOW, beside_tokens_per_s=900.0)), True)],
)
def test_busy_prefill_workers_are_helped_where_answers_leave_room_for_it(decode: WorkerView, local: bool) -> None:
    assert placed(BUSY, decode).local_prefill is (LocalPrefill.PREFILL_WORKERS_BUSY if local else None)


def test_prefill_worker_busy_for_its_cache_is_not_relieved_if_another_is_idle() -> None:
    keeps = replace(BUSY, hit_blocks=100)
    assert placed(keeps, replace(PREFILL, endpoint="p1"), DECODE).local_prefill is None


@pytest.mark.parametrize(("waiting", "local"), [(0, False), (20_000, True)])
def test_short_rest_of_a_prompt_is_computed_next_to_answers_only_if_sooner(waiting: int, local: bool) -> None:
    cached = replace(ANSWERING, hit_blocks=100)
    prefill = replace(PREFILL, tokens_in_flight=waiting, hit_blocks=100)
    assert (placed(prefill, cached).local_prefill is LocalPrefill.SHORT_SUFFIX) is local
    assert placed(prefill, replace(DECODE, hit_blocks=100)).local_prefill is LocalPrefill.SHORT_SUFFIX
