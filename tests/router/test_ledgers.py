"""What placement is fed with: learned rates, recent work, where prompts part, sums of charges, shortlists."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.cache.fan_out import MIDWAY, PrefixFanOut
from baton.router.placement.cluster import ALL_UP_TO, HOLDERS, OTHERS, AttemptCharge, Charges, shortlist
from baton.router.placement.rates import RateLedger
from baton.router.types.placement import UNMEASURED
from baton.router.types.request import session_of


def test_unmeasured_worker_is_assumed_typical() -> None:
    rates = RateLedger()
    assert rates.of("a") == UNMEASURED
    rates.computed("a", tokens=5000, chunks_ms=1000.0)
    assert rates.of("a").prefill_tokens_per_s == pytest.approx(5000)
    assert rates.of("b").prefill_tokens_per_s == pytest.approx(5000)


def test_first_short_prompt_does_not_make_a_worker_slow() -> None:
    ledger = RateLedger()
    for _ in range(5):
        ledger.computed("old", 1500, 75.0)
    ledger.computed("restarted", 3, 60.0)
    assert ledger.of("restarted").prefill_tokens_per_s > 0.33 * ledger.of("old").prefill_tokens_per_s


def test_briefly_slow_worker_is_typical_again_after_many_prompts_of_others() -> None:
    ledger = RateLedger()
    for _ in range(5):
        ledger.computed("old", 1500, 75.0)
    ledger.computed("stood still", 3, 1000.0)
    slow = ledger.of("stood still").prefill_tokens_per_s
    for _ in range(400):
        ledger.computed("old", 1500, 75.0)
    assert slow < 2_000.0
    assert ledger.of("stood still").prefill_tokens_per_s == pytest.approx(20_000.0, rel=0.05)


def test_continuously_measured_workers_keep_their_rates() -> None:
    ledger = RateLedger()
    for _ in range(200):
        for index in range(3):
            ledger.computed(f"fast-{index}", 1500, 75.0)
        ledger.computed("slow", 1500, 750.0)
    assert ledger.of("fast-0").prefill_tokens_per_s == pytest.approx(20_000.0, rel=0.15)
    assert ledger.of("slow").prefill_tokens_per_s == pytest.approx(2_000.0, rel=0.15)


def test_prompt_of_which_nothing_was_computed_tells_nothing() -> None:
    rates = RateLedger()
    rates.computed("a", 0, 3.0)
    assert rates.of("a") == UNMEASURED


def test_token_gap_grows_as_measured_with_requests_in_flight() -> None:
    rates = RateLedger()
    for tokens in (1000, 20_000, 5000, 40_000):
        rates.stepped("a", tokens, 10.0 + tokens / 1000)
    known = rates.of("a")
    assert known.token_gap_ms + 30_000 * known.token_gap_ms_per_token == pytest.approx(40.0)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0.01, 1e4)), min_size=1, max_size=30))
def test_neither_gap_nor_slope_is_ever_negative(measured: list[tuple[int, float]]) -> None:
    rates = RateLedger()
    for tokens, gap_ms in measured:
        rates.stepped("a", tokens, gap_ms)
    assert rates.of("a").token_gap_ms >= -1e-6
    assert rates.of("a").token_gap_ms_per_token >= 0


def test_steps_between_reports_give_the_gap_of_a_busy_worker() -> None:
    rates = RateLedger()
    rates.reported("a", steps=100, is_running=True, tokens_in_flight=0, now=1.0)
    rates.reported("a", steps=101, is_running=True, tokens_in_flight=0, now=1.01)  # too soon to tell
    rates.reported("a", steps=120, is_running=True, tokens_in_flight=0, now=1.2)
    assert rates.of("a").token_gap_ms == pytest.approx(10.0)
    rates.reported("a", steps=121, is_running=False, tokens_in_flight=0, now=1.4)
    rates.reported("a", steps=122, is_running=True, tokens_in_flight=0, now=9.0)
    assert rates.of("a").token_gap_ms == pytest.approx(10.0)


def test_links_and_bytes_of_kv_are_as_workers_say() -> None:
    rates = RateLedger()
    rates.linked("d", {"p0": 40.0, "p1": 0.0})
    rates.transferred(tokens=10, kv_bytes=1000)
    assert rates.of("d").links_gb_per_s == {"p0": 40.0}
    assert rates.of("d").link_gb_per_s == 40.0
    assert rates.of("d").kv_bytes_per_token == rates.of("new").kv_bytes_per_token == 100
    rates.forget("d")
    assert rates.of("d").links_gb_per_s == {}


def test_next_turn_continues_a_prompt_and_others_branch_in_it() -> None:
    fan_out = PrefixFanOut()
    fan_out.placed([b"s", b"1", b"2", b"3"], 0)
    assert fan_out.behind([b"s", b"1", b"2", b"3", b"4"], 4) == 0
    assert fan_out.behind([b"s", b"1", b"2", b"x"], 3) == 0  # the last block was not full
    assert fan_out.behind([b"s", b"y"], 1) == MIDWAY
    assert fan_out.behind([b"s"], 0) == 0


def test_branches_behind_the_end_of_a_prompt_are_counted() -> None:
    fan_out = PrefixFanOut(most_blocks=4)
    fan_out.placed([b"1", b"2"], 0)
    fan_out.placed([b"1", b"2", b"3"], 2)
    fan_out.placed([b"1", b"2", b"4"], 2)
    assert fan_out.behind([b"1", b"2", b"5"], 2) == 2
    fan_out.placed([b"a", b"b", b"c"], 0)
    fan_out.placed([b"d", b"e", b"f"], 0)
    assert fan_out.behind([b"1", b"2"], 2) == MIDWAY  # forgotten


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(0, 9)), max_size=40))
def test_sums_of_charges_equal_the_unreleased_ones(changes: list[tuple[int, bool, int]]) -> None:
    charges, kept = Charges(), dict[int, AttemptCharge]()
    for attempt_id, is_taken, size in changes:
        if is_taken:
            kept[attempt_id] = AttemptCharge(size, 2 * size, 1)
            charges.add(attempt_id, kept[attempt_id])
        else:
            kept.pop(attempt_id, None)
            charges.release(attempt_id)
    assert (charges.tokens, charges.blocks, charges.slots) == (
        sum(each.tokens for each in kept.values()),
        sum(each.blocks for each in kept.values()),
        sum(each.slots for each in kept.values()),
    )
    assert set(charges) == set(kept)
    charges.clear()
    assert (len(charges), charges.tokens, charges.blocks, charges.slots) == (0, 0, 0, 0)


def test_all_workers_of_a_small_cluster_are_candidates() -> None:
    workers = [str(number) for number in range(ALL_UP_TO)]
    assert shortlist(workers, set(workers), (), 7) == workers


def test_large_cluster_offers_the_best_and_in_turn_all_others() -> None:
    workers = [str(number) for number in range(1000)]
    prefixes = [(90, ("500", "of another role")), (80, ("501",)), (3, ("502",))]
    lists = [shortlist(workers, set(workers), prefixes, turn) for turn in range(1000)]
    assert all({"500", "501"} <= set(each) for each in lists)
    assert not all("502" in each or "of another role" in each for each in lists)
    assert max(len(each) for each in lists) <= HOLDERS + OTHERS
    assert {worker for each in lists[:33] for worker in each} == set(workers)
    shared = [shortlist(workers, set(workers), [(2, workers)], turn) for turn in range(0, 1000, 7)]
    assert all(len(set(each)) == len(each) <= HOLDERS + OTHERS for each in shared)
    assert {worker for each in shared for worker in each} == set(workers)


def test_session_is_named_by_a_header() -> None:
    assert session_of([("other", "x"), ("x-session-id", "abc")]) == "abc"
    assert session_of([("x-session-id", b"binary")]) == ""
    assert session_of([]) == ""


def test_decode_worker_says_itself_how_fast_it_computes_prompts() -> None:
    rates = RateLedger()
    rates.computed("p", 1000, 100.0)
    rates.reported_prefill("d", None, None)
    assert (rates.of("d").prefill_tokens_per_s, rates.of("d").beside_tokens_per_s) == (pytest.approx(10_000), None)
    rates.reported_prefill("d", 800.0, 40.0)
    assert (rates.of("d").prefill_tokens_per_s, rates.of("d").beside_tokens_per_s) == (800.0, 40.0)
    assert rates.of("other").beside_tokens_per_s is None
    rates.forget("d")
    assert rates.of("d").beside_tokens_per_s is None


def test_rates_reported_rate_hardly_differs_stay_the_same_object() -> None:
    rates = RateLedger()
    rates.reported_prefill("d", 800.0, 40.0)
    known = rates.of("d")
    rates.reported_prefill("d", 810.0, 39.5)
    assert rates.of("d") is known
    rates.reported_prefill("d", 810.0, 30.0)
    assert rates.of("d").beside_tokens_per_s == 30.0


def test_rates_of_other_workers_stay_the_same_objects_after_a_typical_prompt() -> None:
    ledger = RateLedger()
    for name in ("a", "b"):
        ledger.computed(name, 1000, 100.0)
    ledger.transferred(1000, 100_000)
    before = [ledger.of(name) for name in ("b", "unmeasured")]
    ledger.stepped("a", 5, ledger.of("a").token_gap_ms)
    ledger.transferred(2000, 200_100)
    assert all(each is now for each, now in zip(before, map(ledger.of, ("b", "unmeasured")), strict=True))


def test_rates_change_of_a_worker_replaces_its_object() -> None:
    ledger = RateLedger()
    seen = [ledger.of("a")]
    changes: tuple[Callable[[], None], ...] = (
        lambda: ledger.computed("a", 100, 10.0),
        lambda: ledger.stepped("a", 5, 10.0),
        lambda: ledger.transferred(10, 1000),
        lambda: ledger.linked("a", {"b": 1.0}),
        lambda: ledger.reported_prefill("a", 100.0, None),
        lambda: ledger.forget("a"),
    )
    for change in changes:
        change()
        seen.append(ledger.of("a"))
    assert all(before is not after for before, after in itertools.pairwise(seen))
