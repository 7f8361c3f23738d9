"""Placement policies: only suited workers, ties in turn, nobody left out, and what cache_aware gives up when."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.process.registry.worker_record import WorkerRole
from baton.router.placement.decide import LocalPrefill, NoPrefillWorker, Placement, PlacementPolicy, place
from baton.router.placement.policies import MAX_AFFINITY_MS, REUSE_PREMIUM, Strategy
from baton.router.types.placement import PlacementRequest, WorkerRates, WorkerView, early_block
from tests.fixtures.router_defaults import make_policy
from tests.router.random_clusters import has_model

F = b"f"
SLOW = WorkerRates(prefill_tokens_per_s=1000.0)
REQUEST = PlacementRequest(fingerprint=F, block_tokens=32, prompt_tokens=3201, max_tokens=100, choices=1)
PREFILL = WorkerView("p0", WorkerRole.PREFILL, F, 10_000, 0, 0, 0, rates=SLOW)
DECODE = WorkerView("d0", WorkerRole.DECODE, F, 10_000, 64, 10_000, 64, rates=SLOW)
AWARE = make_policy(NoPrefillWorker.QUEUE, strategy=Strategy.CACHE_AWARE)
STRATEGIES = st.sampled_from(list(Strategy))

worker_views = st.builds(
    WorkerView,
    endpoint=st.integers(0, 999).map(str),
    role=st.sampled_from(list(WorkerRole)),
    fingerprint=st.sampled_from([F, F, F, b"g"]),
    total_blocks=st.integers(50, 1000),
    total_slots=st.integers(1, 8),
    limit_blocks=st.integers(0, 500),
    limit_slots=st.integers(0, 8),
    used_blocks=st.integers(0, 400),
    used_slots=st.integers(0, 8),
    tokens_in_flight=st.integers(0, 100_000),
    hit_blocks=st.integers(0, 120),
    ready_blocks=st.integers(0, 120),
    pending_prompt_tokens=st.integers(0, 100_000),
    recent_tokens=st.floats(0, 1e6),
    rates=st.builds(WorkerRates, prefill_tokens_per_s=st.floats(10, 1e5), token_gap_ms=st.floats(0.1, 100)),
    branches=st.integers(0, 50),
    tier_blocks=st.integers(0, 120),
    tier_block_bytes=st.integers(1, 10**7),
    load_bytes_per_s=st.just(0.0) | st.floats(1e3, 1e11),
)
clusters = st.lists(worker_views, max_size=12, unique_by=lambda view: view.endpoint)
requests = st.builds(
    PlacementRequest,
    fingerprint=st.just(F),
    block_tokens=st.just(32),
    prompt_tokens=st.integers(1, 4000),
    max_tokens=st.integers(1, 500),
    choices=st.integers(1, 3),
    turn=st.integers(0, 2**40),
    avoided_prefill=st.frozensets(st.integers(0, 999).map(str), max_size=3),
    prefix=st.binary(max_size=32),
    session=st.none() | st.text(max_size=5),
)


def placed(request: PlacementRequest, *workers: WorkerView, policy: PlacementPolicy = AWARE) -> Placement:
    outcome = place(request, workers, policy)
    assert isinstance(outcome, Placement)
    return outcome


def prefill(number: int, **state: float) -> WorkerView:
    return replace(PREFILL, endpoint=f"p{number}", **state)  # type: ignore[arg-type]


@settings(max_examples=60)
@given(requests, clusters, STRATEGIES, st.sampled_from(list(NoPrefillWorker)))
def test_only_suited_workers_with_credit_are_chosen(
    request: PlacementRequest, workers: list[WorkerView], strategy: Strategy, without: NoPrefillWorker
) -> None:
    outcome = place(request, workers, make_policy(without, strategy=strategy))
    if not isinstance(outcome, Placement):
        return
    by_endpoint = {worker.endpoint: worker for worker in workers}
    decode = by_endpoint[outcome.decode]
    assert decode.role is WorkerRole.DECODE and has_model(request, decode)
    assert decode.used_slots + request.choices <= decode.limit_slots
    alone = decode.used_blocks == 0 and decode.limit_blocks >= decode.total_blocks
    assert decode.used_blocks + request.charged_blocks <= decode.limit_blocks or alone
    if outcome.prefill is None:
        assert without is NoPrefillWorker.LOCAL and outcome.local_prefill is not None
    else:
        assert by_endpoint[outcome.prefill].role is WorkerRole.PREFILL and has_model(
            request, by_endpoint[outcome.prefill]
        )


@settings(max_examples=60)
@given(requests, clusters, STRATEGIES)
def test_same_snapshot_gives_the_same_placement_and_is_not_changed(
    request: PlacementRequest, workers: list[WorkerView], strategy: Strategy
) -> None:
    before = [replace(worker) for worker in workers]
    policy = make_policy(strategy=strategy)
    assert place(request, workers, policy) == place(request, workers, policy)
    assert workers == before


@pytest.mark.parametrize("strategy", [each for each in Strategy if each is not Strategy.PREFIX_HASH])
def test_equal_workers_are_chosen_equally_often(strategy: Strategy) -> None:
    workers = [prefill(number) for number in range(5)]
    policy = make_policy(NoPrefillWorker.QUEUE, strategy=strategy)
    taken = Counter(placed(replace(REQUEST, turn=turn), *workers, DECODE, policy=policy).prefill for turn in range(50))
    assert sorted(taken.values()) == [10] * 5


def test_round_robin_ignores_load_and_cache() -> None:
    policy = make_policy(NoPrefillWorker.QUEUE, strategy=Strategy.ROUND_ROBIN)
    workers = [prefill(0, tokens_in_flight=10**6), prefill(1, hit_blocks=90), prefill(2)]
    assert [placed(replace(REQUEST, turn=turn), *workers, DECODE, policy=policy).prefill for turn in range(4)] == [
        "p0",
        "p1",
        "p2",
        "p0",
    ]


def test_prompts_with_a_common_prefix_keep_their_worker_until_it_is_lost() -> None:
    policy = make_policy(NoPrefillWorker.QUEUE, strategy=Strategy.PREFIX_HASH)
    workers = [prefill(number) for number in range(8)]
    keys = [bytes([number]) * 32 for number in range(200)]
    homes = {key: placed(replace(REQUEST, prefix=key), *workers, DECODE, policy=policy).prefill for key in keys}
    assert min(Counter(homes.values()).values()) > 8  # of 25 on average
    fewer = {
        key: placed(replace(REQUEST, prefix=key), *reversed(workers[1:]), DECODE, policy=policy).prefill for key in keys
    }
    assert all(fewer[key] == home for key, home in homes.items() if home != "p0")


def test_early_block_is_the_last_one_within_its_limit() -> None:
    hashes = [bytes([number]) for number in range(40)]
    assert early_block(hashes, 32) == hashes[31]
    assert early_block(hashes[:3], 32) == hashes[2]
    assert early_block(hashes, 4096) == hashes[0]
    assert early_block((), 32) == b""


def test_conversation_stays_where_its_cache_is_though_another_would_be_sooner() -> None:
    """1600 tokens are cached: 1.6 s to compute again, and 3 s of waiting are less than REUSE_PREMIUM times that."""
    home = prefill(1, hit_blocks=50, tokens_in_flight=3000)
    assert placed(REQUEST, prefill(0), home, DECODE).prefill == "p1"


def test_wait_for_a_cache_is_bounded_by_patience() -> None:
    home = prefill(1, hit_blocks=100, tokens_in_flight=1000)
    assert placed(REQUEST, prefill(0), home, DECODE).prefill == "p1"
    overdue = int(MAX_AFFINITY_MS) + 3200 + 1  # at one token a millisecond
    assert placed(REQUEST, prefill(0), replace(home, tokens_in_flight=overdue), DECODE).prefill == "p0"


def test_prefix_behind_which_many_parted_is_sooner_computed_on_another_worker() -> None:
    home = prefill(1, hit_blocks=20, tokens_in_flight=6000)  # 640 ms again, against 6 s of waiting
    assert REUSE_PREMIUM * 640 > 6000
    assert placed(REQUEST, prefill(0), home, DECODE).prefill == "p1"
    assert placed(REQUEST, prefill(0), replace(home, branches=30), DECODE).prefill == "p0"


def test_faster_worker_may_have_more_before_it() -> None:
    fast = replace(prefill(1), rates=WorkerRates(prefill_tokens_per_s=4000.0), tokens_in_flight=4000)
    assert placed(REQUEST, prefill(0), fast, DECODE).prefill == "p1"
    assert placed(REQUEST, prefill(0), replace(fast, tokens_in_flight=10_000), DECODE).prefill == "p0"


def test_decode_worker_finishing_first_is_chosen() -> None:
    """Tokens come further apart the more is in flight; what is cached need not be transferred."""
    busy = replace(DECODE, tokens_in_flight=500_000)
    other = replace(DECODE, endpoint="d1")
    assert placed(REQUEST, PREFILL, busy, other).decode == "d1"
    slow_link = replace(SLOW, kv_bytes_per_token=1e6, links_gb_per_s={"p0": 0.1})
    far, near = replace(DECODE, rates=slow_link), replace(other, rates=replace(slow_link, links_gb_per_s={"p0": 50.0}))
    assert placed(REQUEST, PREFILL, far, near).decode == "d1"
    assert placed(REQUEST, PREFILL, replace(far, hit_blocks=100), replace(near, tokens_in_flight=10**6)).decode == "d0"


@pytest.mark.parametrize(("waiting", "local"), [(2_000, False), (60_000, True)])
def test_decode_worker_computes_the_prompt_where_prefill_is_far_busier(waiting: int, local: bool) -> None:
    policy = make_policy(NoPrefillWorker.LOCAL, strategy=Strategy.CACHE_AWARE)
    placement = placed(REQUEST, prefill(0, tokens_in_flight=waiting), DECODE, policy=policy)
    assert (placement.prefill is None) is local
    assert placement.local_prefill is (LocalPrefill.PREFILL_WORKERS_BUSY if local else None)
    queued = placed(REQUEST, prefill(0, tokens_in_flight=waiting), DECODE)  # where the operator wants none of that
    assert queued.prefill == "p0"


def test_session_stays_on_its_workers_until_they_are_overloaded() -> None:
    workers = [prefill(number) for number in range(4)]
    decode = [replace(DECODE, endpoint=f"d{number}") for number in range(4)]
    request = replace(REQUEST, session="mine")
    first = placed(request, *workers, *decode)
    again = [placed(replace(request, turn=turn), *workers, *decode) for turn in range(20)]
    assert {each.endpoints for each in again} == {first.endpoints}
    full = [replace(each, tokens_in_flight=60_000) if each.endpoint == first.prefill else each for each in workers]
    assert placed(request, *full, *decode).prefill != first.prefill
    others = {placed(replace(REQUEST, session=str(n)), *workers, *decode).prefill for n in range(40)}
    assert len(others) == 4


def test_expected_times_are_told() -> None:
    placement = placed(REQUEST, prefill(0, tokens_in_flight=500, hit_blocks=50), DECODE)
    assert placement.expected_ttft_ms == pytest.approx(500 + 3201 - 1600)
    assert placement.expected_token_gap_ms > SLOW.token_gap_ms
    assert placement.policy == "cache_aware"
