"""Placement: least loaded, most cached, only with credit, only among equals."""

from dataclasses import replace

import pytest

from baton.process.registry.worker_record import WorkerRole
from baton.router.placement.decide import LocalPrefill, NoPrefillWorker, NoRoom, Placement, place
from baton.router.placement.policies import Strategy
from baton.router.types.placement import PlacementRequest, WorkerView
from baton.router.types.worker import Adapter
from tests.fixtures.router_defaults import make_policy

F = b"f"
POLICY = make_policy(NoPrefillWorker.QUEUE, strategy=Strategy.LEAST_TOKENS)
LOCAL = make_policy(NoPrefillWorker.LOCAL, strategy=Strategy.LEAST_TOKENS)
REQUEST = PlacementRequest(fingerprint=F, block_tokens=4, prompt_tokens=10, max_tokens=6, choices=1)
PREFILL = WorkerView("p0", WorkerRole.PREFILL, F, 100, 0, 0, 0)
DECODE = WorkerView("d0", WorkerRole.DECODE, F, 100, 8, 100, 8)


def placed(request: PlacementRequest, *workers: WorkerView) -> Placement:
    outcome = place(request, workers, POLICY)
    assert isinstance(outcome, Placement)
    return outcome


def test_least_loaded_workers_are_chosen() -> None:
    other_prefill = replace(PREFILL, endpoint="p1", tokens_in_flight=5)
    other_decode = replace(DECODE, endpoint="d1", tokens_in_flight=5)
    busy_prefill = replace(PREFILL, tokens_in_flight=6)
    busy_decode = replace(DECODE, tokens_in_flight=6)
    placement = placed(REQUEST, busy_prefill, other_prefill, busy_decode, other_decode)
    assert (placement.prefill, placement.decode) == ("p1", "d1")
    assert (placement.prefill_candidates, placement.decode_candidates) == (2, 2)


def test_cached_prefix_outweighs_as_many_tokens_in_flight() -> None:
    cached = replace(PREFILL, endpoint="p1", hit_blocks=2, tokens_in_flight=7)
    assert placed(REQUEST, PREFILL, cached, DECODE).prefill == "p1"
    assert placed(REQUEST, PREFILL, replace(cached, tokens_in_flight=9), DECODE).prefill == "p0"


@pytest.mark.parametrize(("prompt_tokens", "hit_tokens"), [(8, 4), (9, 8), (4, 0), (1, 0)])
def test_hit_ends_before_the_block_of_the_last_prompt_token(prompt_tokens: int, hit_tokens: int) -> None:
    request = replace(REQUEST, prompt_tokens=prompt_tokens)
    assert request.hit_tokens(replace(PREFILL, hit_blocks=2)) == hit_tokens


def test_failed_prefill_worker_is_chosen_only_without_another() -> None:
    request = PlacementRequest(F, 32, 64, 1, 1, avoided_prefill=frozenset({"p0"}))
    assert placed(request, PREFILL, DECODE).prefill == "p0"
    assert placed(request, PREFILL, replace(PREFILL, endpoint="p1", tokens_in_flight=9999), DECODE).prefill == "p1"


def test_request_with_an_adapter_is_placed_only_where_it_is_loaded() -> None:
    wanted, other = Adapter("sql", "aa"), Adapter("sql", "bb")
    request = replace(REQUEST, adapter=wanted)
    idle = [PREFILL, DECODE, replace(PREFILL, endpoint="p1", adapters=(other,))]
    right = [replace(each, endpoint=f"{each.endpoint}-sql", adapters=(wanted,), tokens_in_flight=5) for each in idle]
    placement = placed(request, *idle, *right[:2])
    assert (placement.prefill, placement.decode) == ("p0-sql", "d0-sql")
    assert placed(REQUEST, *idle, *right).decode == "d0"
    assert place(request, [*idle, right[1]], POLICY) is NoRoom.NO_PREFILL_WORKER
    assert place(request, [*idle, right[0]], LOCAL) is NoRoom.NO_DECODE_WORKER


def test_equal_workers_take_turns() -> None:
    prefill = [replace(PREFILL, endpoint=f"p{i}") for i in range(3)]
    taken = [placed(replace(REQUEST, turn=turn), *prefill, DECODE).prefill for turn in range(6)]
    assert sorted(map(str, taken)) == ["p0", "p0", "p1", "p1", "p2", "p2"]


@pytest.mark.parametrize(
    ("prompt", "most", "choices", "blocks"),
    [(10, 6, 1, 4), (10, 7, 1, 5), (8, 1, 1, 3), (8, 1, 4, 6), (1, 1, 1, 1), (8, 256, 2, 130), (8, 100_000, 2, 130)],
)
def test_request_is_charged_for_shared_blocks_and_bounded_answers(
    prompt: int, most: int, choices: int, blocks: int
) -> None:
    request = replace(REQUEST, prompt_tokens=prompt, max_tokens=most, choices=choices)
    assert request.charged_blocks == blocks


def test_workers_of_another_fingerprint_do_not_count() -> None:
    assert place(REQUEST, [replace(PREFILL, fingerprint=b"g"), DECODE], POLICY) is NoRoom.NO_PREFILL_WORKER
    assert place(REQUEST, [PREFILL, replace(DECODE, fingerprint=b"g")], POLICY) is NoRoom.NO_DECODE_WORKER


def test_without_a_prefill_worker_the_decode_worker_computes_the_prompt() -> None:
    placement = place(REQUEST, [replace(PREFILL, fingerprint=b"g"), DECODE], LOCAL)
    assert isinstance(placement, Placement)
    assert (placement.prefill, placement.decode) == (None, "d0")
    assert placement.local_prefill is LocalPrefill.NO_PREFILL_WORKER
    assert placement.endpoints == ("d0",)
    assert place(REQUEST, [PREFILL], LOCAL) is NoRoom.NO_DECODE_WORKER


def test_prompt_that_failed_on_all_prefill_workers_is_computed_by_decode() -> None:
    request = replace(REQUEST, avoided_prefill=frozenset({"p0"}))
    placement = place(request, [PREFILL, DECODE], LOCAL)
    assert isinstance(placement, Placement)
    assert placement.local_prefill is LocalPrefill.PREFILL_WORKERS_FAILED


@pytest.mark.parametrize(
    ("hit_blocks", "suffix", "local"), [(2, 2, True), (2, 1, False), (1, 5, False), (0, 16, False)]
)
def test_short_rest_of_a_cached_prompt_is_computed_at_its_cache(hit_blocks: int, suffix: int, local: bool) -> None:
    """Of 10 tokens in blocks of 4. A prompt of which nothing is cached is a prompt like any other, however short."""
    policy = replace(POLICY, local_prefill_tokens=suffix)
    placement = place(REQUEST, [PREFILL, replace(DECODE, hit_blocks=hit_blocks)], policy)
    assert isinstance(placement, Placement)
    assert placement.local_prefill is (LocalPrefill.SHORT_SUFFIX if local else None)
    assert placement.prefill == (None if local else "p0")
