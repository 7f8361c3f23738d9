"""Placements where parts of a prompt lie in files: priced by loading where that is sooner, else by computing."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.process.registry.worker_record import WorkerRole
from baton.router.placement.decide import (
    Decision,
    LocalPrefill,
    NoPrefillWorker,
    Placement,
    PlacementPolicy,
    decide,
    place,
)
from baton.router.placement.policies import CacheAware
from baton.router.placement.rates import expected_here, known_tokens, loading
from baton.router.types.placement import PlacementRequest, WorkerRates, WorkerView
from baton.text.kv_loading import FIXED_S
from tests.fixtures.router_defaults import make_policy
from tests.router.test_policies import AWARE, DECODE, PREFILL, REQUEST, prefill, requests, worker_views

FILES = {"tier_blocks": 50, "tier_block_bytes": 1_000_000, "load_bytes_per_s": 1e9}
"""1600 tokens, 1.6 s to compute and 54 ms to load."""
LOAD_MS = 1e3 * FIXED_S + 50.0


def placed(*workers: WorkerView, request: PlacementRequest = REQUEST, policy: PlacementPolicy = AWARE) -> Placement:
    outcome = place(request, workers, policy)
    assert isinstance(outcome, Placement)
    return outcome


def test_blocks_in_files_are_expected_to_be_loaded() -> None:
    expected = expected_here(REQUEST, prefill(0, hit_blocks=10, **FILES))
    assert (expected.compute_ms, expected.load_ms) == pytest.approx((3201 - 60 * 32, LOAD_MS))
    assert expected.ttft_ms == pytest.approx(3201 - 60 * 32 + LOAD_MS)


def test_worker_that_can_load_is_preferred_and_one_with_the_blocks_even_more() -> None:
    loads = prefill(1, **FILES)
    placement = placed(prefill(0), loads, DECODE)
    assert (placement.prefill, placement.loaded_tokens) == ("p1", 1600)
    assert (placement.load_ms, placement.expected_ttft_ms) == pytest.approx((LOAD_MS, 1601 + LOAD_MS))
    at_hand = placed(prefill(0, hit_blocks=50), loads, DECODE)
    assert (at_hand.prefill, at_hand.loaded_tokens) == ("p0", 0)


def test_conversation_need_not_wait_for_its_pool_where_others_load_it() -> None:
    """Without files it stays, although another worker would be sooner: 3 s of waiting against 1.6 s of computing."""
    home = prefill(1, hit_blocks=50, tokens_in_flight=3000)
    assert placed(prefill(0), home, DECODE).prefill == "p1"
    assert placed(prefill(0, **FILES), home, DECODE).prefill == "p0"


def test_worker_loads_while_it_computes_others_one_prompt_after_another() -> None:
    behind = prefill(0, **FILES, tokens_in_flight=30)
    assert expected_here(REQUEST, behind).load_ms == pytest.approx(LOAD_MS - 30)
    assert expected_here(REQUEST, replace(behind, tokens_in_flight=1000)).load_ms == 0.0
    assert expected_here(REQUEST, replace(behind, loading_ms=500.0)).load_ms == pytest.approx(LOAD_MS + 500 - 30)
    assert expected_here(REQUEST, replace(behind, loading_ms=500.0, tier_blocks=0)).load_ms == 0.0
    assert placed(prefill(1, **FILES, loading_ms=200.0), prefill(0, **FILES), DECODE).prefill == "p0"


def test_where_loading_is_not_sooner_the_price_is_that_of_computing() -> None:
    slow = prefill(0, **{**FILES, "load_bytes_per_s": 1e7})
    assert loading(REQUEST, slow).blocks == 0
    assert expected_here(REQUEST, slow) == expected_here(REQUEST, prefill(0))
    assert placed(slow, DECODE).loaded_tokens == 0


def test_unmeasured_rate_is_assumed() -> None:
    assert loading(REQUEST, prefill(0, **{**FILES, "load_bytes_per_s": 0.0})).ms == pytest.approx(LOAD_MS)


def test_block_of_the_last_token_is_never_loaded() -> None:
    whole = prefill(0, **{**FILES, "tier_blocks": 101}, hit_blocks=0)
    assert loading(REQUEST, whole).blocks == 100
    assert loading(replace(REQUEST, prompt_tokens=3200), whole).blocks == 99
    assert loading(REQUEST, replace(whole, hit_blocks=120)).blocks == 0


def test_terms_that_decided_show_the_loading() -> None:
    decision = decide(REQUEST, [prefill(0), prefill(1, **FILES), DECODE], AWARE)
    assert isinstance(decision, Decision) and decision.prefill is not None
    terms, totals = decision.prefill.terms(), decision.prefill.totals()
    assert (terms["p0"]["load_ms"], terms["p1"]["load_ms"]) == (0.0, pytest.approx(LOAD_MS))
    assert terms["p1"]["compute_ms"] == pytest.approx(1601)
    for endpoint, total in totals.items():
        assert total == pytest.approx(sum(terms[endpoint].values()))
    without = decide(REQUEST, [prefill(0), prefill(1), DECODE], AWARE)
    assert isinstance(without, Decision) and without.prefill is not None
    assert "load_ms" not in without.prefill.costs.terms


@pytest.mark.parametrize(("tier_blocks", "local"), [(100, True), (90, False)])
def test_decode_worker_computes_a_short_rest_after_loading(tier_blocks: int, local: bool) -> None:
    policy = make_policy(NoPrefillWorker.QUEUE, local_prefill_tokens=64)
    decode = replace(DECODE, tier_blocks=tier_blocks, tier_block_bytes=1_000_000, load_bytes_per_s=1e9)
    placement = placed(prefill(0), decode, policy=policy)
    assert (placement.local_prefill is LocalPrefill.SHORT_SUFFIX) is local
    assert placement.loaded_tokens == (3200 if local else 0)
    slow = placed(prefill(0), replace(decode, load_bytes_per_s=1e6), policy=policy)
    assert slow.local_prefill is None, "it would compute them, and all that is not loaded"


def test_loaded_tokens_are_not_charged_and_the_complete_prompt_is_expected() -> None:
    request, worker = replace(REQUEST, prompt_tokens=1601), prefill(0, **FILES)
    assert known_tokens(request, worker) == 1600
    assert placed(worker, DECODE, request=request).expected_ttft_ms == pytest.approx(1 + LOAD_MS)


@settings(max_examples=200)
@given(requests, worker_views)
def test_files_never_make_a_prefill_worker_dearer_and_never_count_twice(
    request: PlacementRequest, worker: WorkerView
) -> None:
    worker = replace(worker, role=WorkerRole.PREFILL)
    without = replace(worker, tier_blocks=0)
    assert expected_here(request, worker).ttft_ms <= expected_here(request, without).ttft_ms + 1e-6
    assert request.hit_tokens(worker) <= known_tokens(request, worker) <= request.reusable_blocks * 32
    if worker.hit_blocks >= request.reusable_blocks:
        assert expected_here(request, worker) == expected_here(request, without)
    costs, plain = (CacheAware().prefill_costs(request, [each]).totals[0] for each in (worker, without))
    assert costs <= plain + 1e-6


@settings(max_examples=200)
@given(requests, worker_views, st.floats(1.0, 1e6))
def test_faster_files_are_never_worse(request: PlacementRequest, worker: WorkerView, more: float) -> None:
    worker = replace(worker, role=WorkerRole.PREFILL, load_bytes_per_s=worker.load_bytes_per_s or 1e3)
    faster = replace(worker, load_bytes_per_s=worker.load_bytes_per_s * more)
    assert expected_here(request, faster).ttft_ms <= expected_here(request, worker).ttft_ms + 1e-6


HOLDER = replace(DECODE, tier_blocks=100, tier_block_bytes=1_000_000, load_bytes_per_s=1e9)


def test_files_of_another_machine_are_fetched_through_its_worker() -> None:
    placement = placed(PREFILL, HOLDER)
    assert (placement.fetch_from, placement.fetch_tokens, placement.fetch_loaded_tokens) == ("d0", 3200, 3200)
    assert placement.fetch_load_bytes_per_s == 1e9
    some = placed(PREFILL, replace(HOLDER, hit_blocks=30, ready_blocks=30, tier_blocks=20))
    assert (some.fetch_tokens, some.fetch_loaded_tokens) == (1600, 640)


@pytest.mark.parametrize("slow", ["disk", "link"])
def test_file_blocks_are_computed_if_that_is_sooner(slow: str) -> None:
    disk, link = (1e6 if slow == "disk" else 1e9), (0.001 if slow == "link" else 10.0)
    rates = WorkerRates(prefill_tokens_per_s=1000.0, links_gb_per_s={"d0": link})
    assert placed(replace(PREFILL, rates=rates), replace(HOLDER, load_bytes_per_s=disk)).fetch_from is None


def test_files_of_the_prefill_worker_are_not_fetched_from_others() -> None:
    own = replace(PREFILL, tier_blocks=100, tier_block_bytes=1_000_000, load_bytes_per_s=1e9)
    assert placed(own, HOLDER).fetch_from is None


def test_equal_pool_hit_is_fetched_before_files() -> None:
    ready = replace(DECODE, endpoint="d1", hit_blocks=100, ready_blocks=100, tokens_in_flight=9)
    placement = placed(PREFILL, HOLDER, ready)
    assert (placement.fetch_from, placement.fetch_loaded_tokens) == ("d1", 0)
    half = replace(ready, hit_blocks=50, ready_blocks=50)
    assert placed(PREFILL, HOLDER, half).fetch_from == "d0", "files have more"


def test_blocks_that_are_only_expected_in_a_pool_cannot_be_fetched_behind() -> None:
    placement = placed(PREFILL, replace(HOLDER, hit_blocks=5, ready_blocks=4))
    assert (placement.fetch_tokens, placement.fetch_loaded_tokens) == (128, 0)


def test_without_a_worker_that_may_compute_locally_the_price_is_the_same() -> None:
    policy = make_policy(NoPrefillWorker.QUEUE, local_prefill_tokens=64)
    assert placed(prefill(0), prefill(1, **FILES), DECODE, policy=policy).prefill == "p1"
