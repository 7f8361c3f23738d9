"""Placement: least loaded, most cached, only with credit, only among equals."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.placement import NoRoom, Placement, PlacementRequest, WorkerView, place
from router.prefix_index import PrefixIndex
from router.worker import WorkerRole

F = b"f"
REQUEST = PlacementRequest(fingerprint=F, block_tokens=4, prompt_tokens=10, max_tokens=6, choices=1)
PREFILL = WorkerView("p0", WorkerRole.PREFILL, F, 100, 0, 0, 0)
DECODE = WorkerView("d0", WorkerRole.DECODE, F, 100, 8, 100, 8)


def placed(request: PlacementRequest, *workers: WorkerView) -> Placement:
    outcome = place(request, workers)
    assert isinstance(outcome, Placement)
    return outcome


def test_the_least_loaded_workers_are_taken() -> None:
    other_prefill = replace(PREFILL, endpoint="p1", tokens_in_flight=5)
    other_decode = replace(DECODE, endpoint="d1", tokens_in_flight=5)
    busy_prefill = replace(PREFILL, tokens_in_flight=6)
    busy_decode = replace(DECODE, tokens_in_flight=6)
    placement = placed(REQUEST, busy_prefill, other_prefill, busy_decode, other_decode)
    assert (placement.prefill, placement.decode) == ("p1", "d1")
    assert (placement.prefill_candidates, placement.decode_candidates) == (2, 2)


def test_a_cached_prefix_outweighs_as_many_tokens_in_flight() -> None:
    cached = replace(PREFILL, endpoint="p1", hit_blocks=2, tokens_in_flight=7)
    assert placed(REQUEST, PREFILL, cached, DECODE).prefill == "p1"
    assert placed(REQUEST, PREFILL, replace(cached, tokens_in_flight=9), DECODE).prefill == "p0"


@pytest.mark.parametrize(("prompt_tokens", "hit_tokens"), [(8, 4), (9, 8), (4, 0), (1, 0)])
def test_a_hit_ends_before_the_block_of_the_last_prompt_token(prompt_tokens: int, hit_tokens: int) -> None:
    request = replace(REQUEST, prompt_tokens=prompt_tokens)
    assert request.hit_tokens(replace(PREFILL, hit_blocks=2)) == hit_tokens


def test_a_prefill_worker_that_failed_the_request_is_taken_only_without_another() -> None:
    request = PlacementRequest(F, 32, 64, 1, 1, avoided_prefill=frozenset({"p0"}))
    assert placed(request, PREFILL, DECODE).prefill == "p0"
    assert placed(request, PREFILL, replace(PREFILL, endpoint="p1", tokens_in_flight=9999), DECODE).prefill == "p1"


def test_equal_workers_take_turns() -> None:
    prefill = [replace(PREFILL, endpoint=f"p{i}") for i in range(3)]
    taken = [placed(replace(REQUEST, turn=turn), *prefill, DECODE).prefill for turn in range(6)]
    assert sorted(taken) == ["p0", "p0", "p1", "p1", "p2", "p2"]


@pytest.mark.parametrize(
    ("prompt", "most", "choices", "blocks"), [(10, 6, 1, 4), (10, 7, 1, 5), (8, 1, 1, 3), (8, 1, 4, 6), (1, 1, 1, 1)]
)
def test_the_worst_case_shares_complete_prompt_blocks(prompt: int, most: int, choices: int, blocks: int) -> None:
    request = replace(REQUEST, prompt_tokens=prompt, max_tokens=most, choices=choices)
    assert request.worst_blocks == blocks


@pytest.mark.parametrize(
    "short", [replace(DECODE, used_blocks=97), replace(DECODE, used_slots=8), replace(DECODE, limit_blocks=3)]
)
def test_without_credit_there_is_no_room_yet(short: WorkerView) -> None:
    assert place(REQUEST, [PREFILL, short]) is NoRoom.NO_CREDIT
    assert placed(REQUEST, PREFILL, short, replace(DECODE, endpoint="d1", tokens_in_flight=999)).decode == "d1"


@pytest.mark.parametrize("small", [replace(DECODE, total_blocks=3, limit_blocks=3), replace(DECODE, used_slots=1)])
def test_what_no_idle_worker_could_hold_never_fits(small: WorkerView) -> None:
    request = REQUEST if small.total_blocks == 3 else replace(REQUEST, choices=9)
    assert place(request, [PREFILL, small]) is NoRoom.NEVER_FITS


def test_workers_of_another_fingerprint_do_not_count() -> None:
    assert place(REQUEST, [replace(PREFILL, fingerprint=b"g"), DECODE]) is NoRoom.NO_PREFILL_WORKER
    assert place(REQUEST, [PREFILL, replace(DECODE, fingerprint=b"g")]) is NoRoom.NO_DECODE_WORKER


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 8), st.integers(0, 50)), min_size=1, max_size=6))
def test_no_placement_exceeds_credit(loads: list[tuple[int, int, int]]) -> None:
    decode = [
        replace(DECODE, endpoint=f"d{i}", used_blocks=blocks, used_slots=slots, tokens_in_flight=tokens)
        for i, (blocks, slots, tokens) in enumerate(loads)
    ]
    outcome = place(REQUEST, [PREFILL, *decode])
    if isinstance(outcome, Placement):
        chosen = next(worker for worker in decode if worker.endpoint == outcome.decode)
        assert chosen.used_blocks + REQUEST.worst_blocks <= chosen.limit_blocks
        assert chosen.used_slots < chosen.limit_slots
    else:
        assert outcome is NoRoom.NO_CREDIT


def test_the_index_predicts_the_longest_prefix_that_was_sent() -> None:
    index = PrefixIndex()
    index.record("p0", [b"1", b"2", b"3"], capacity_blocks=10)
    assert index.hit_blocks("p0", [b"1", b"2", b"x", b"3"]) == 2
    assert index.hit_blocks("p1", [b"1"]) == 0
    index.forget("p0")
    assert index.hit_blocks("p0", [b"1"]) == 0


def test_the_index_forgets_the_least_recent_and_the_ends_of_prompts_first() -> None:
    index = PrefixIndex()
    index.record("p0", [b"1", b"2"], capacity_blocks=3)
    index.record("p0", [b"3", b"4"], capacity_blocks=3)
    assert index.hit_blocks("p0", [b"1", b"2"]) == 1
    assert index.hit_blocks("p0", [b"3", b"4"]) == 2
