"""What a placement's costs are made of, in milliseconds, and which worker is taken where costs just differ."""

import math
from dataclasses import replace

import pytest

from baton.process.registry.worker_record import WorkerRole
from baton.router.placement.cluster import STALLED_S as WITHOUT_A_STEP_S
from baton.router.placement.cluster import AttemptCharge, Charges, PairCircuitBreaker, RecentWork, StallDetector
from baton.router.placement.decide import NoPrefillWorker, NoRoom, Placement, place
from baton.router.placement.eligible import ineligible
from baton.router.placement.policies import (
    BUSY_FACTOR,
    BUSY_MS,
    MAX_AFFINITY_MS,
    POLICIES,
    RECENT_LOAD_WEIGHT,
    REUSE_PREMIUM,
    SHARED_REUSE_PREMIUM,
    Strategy,
    cheapest,
    home_of,
)
from baton.router.placement.rates import (
    CAUTION,
    MOST_ASSUMED,
    DecayingLine,
    Ratio,
    expected_here,
    prompt_tokens_per_s,
    token_gap_ms,
)
from baton.router.types.placement import PlacementRequest, WorkerRates, WorkerView
from baton.router.types.worker import PoolBlocks, WorkerReport
from baton.text.block_groups import BlockGroups
from tests.fixtures.router_defaults import make_policy

RATES = WorkerRates(prefill_tokens_per_s=1000.0, token_gap_ms=10.0, token_gap_ms_per_token=0.001)  # 1 ms a token
REQUEST = PlacementRequest(fingerprint=b"f", block_tokens=32, prompt_tokens=3201, max_tokens=100, choices=1)
P0, P1 = (WorkerView(name, WorkerRole.PREFILL, b"f", 10_000, 0, 0, 0, rates=RATES) for name in ("p0", "p1"))
D0, D1 = (WorkerView(name, WorkerRole.DECODE, b"f", 10_000, 64, 10_000, 64, rates=RATES) for name in ("d0", "d1"))
AWARE = POLICIES[Strategy.CACHE_AWARE]


def test_prompt_costs_its_wait_its_tokens_and_a_little_for_recent_work() -> None:
    costs = AWARE.prefill_costs(REQUEST, [replace(P0, tokens_in_flight=500, recent_tokens=100.0), P1])
    assert costs.terms == {
        "wait_ms": [500.0, 0.0],
        "compute_ms": [3201.0, 3201.0],
        "balance_ms": [100 * RECENT_LOAD_WEIGHT, 0.0],
    }
    assert costs.totals == [3701.0 + 100 * RECENT_LOAD_WEIGHT, 3201.0]


def test_prompt_computed_again_costs_a_premium_that_the_shortest_wait_bounds() -> None:
    """Two blocks less are computed again at 64 ms; all of 100 blocks would cost far more than patience."""
    workers = [replace(P0, hit_blocks=50, tokens_in_flight=70), replace(P1, hit_blocks=48, tokens_in_flight=90)]
    assert AWARE.prefill_costs(REQUEST, workers).terms["affinity_ms"] == [0.0, (REUSE_PREMIUM - 1) * 64]
    workers[1] = replace(P1, tokens_in_flight=90)
    assert AWARE.prefill_costs(REQUEST, workers).terms["affinity_ms"] == [0.0, MAX_AFFINITY_MS + 70]


@pytest.mark.parametrize(
    ("branches", "keep"),
    [(0, REUSE_PREMIUM), (1, REUSE_PREMIUM / 2), (9, REUSE_PREMIUM / 10), (10, SHARED_REUSE_PREMIUM)],
)
def test_premium_falls_with_the_prompts_that_part_there(branches: int, keep: float) -> None:
    """As seen by the worker that has most of the prompt, whichever that is."""
    workers = [replace(P0, hit_blocks=2, branches=30), replace(P1, hit_blocks=3, branches=branches)]
    assert AWARE.prefill_costs(REQUEST, workers).terms["affinity_ms"] == [(keep - 1) * 32, 0.0]


def test_blocks_beyond_the_reusable_ones_save_nothing() -> None:
    costs = AWARE.prefill_costs(REQUEST, [replace(P0, hit_blocks=100), replace(P1, hit_blocks=101)])
    assert costs.terms["compute_ms"] == [1.0, 1.0], "the last token is computed in any case"
    assert "affinity_ms" not in costs.terms


def test_session_away_from_its_home_costs_patience_and_the_shortest_wait() -> None:
    request = replace(REQUEST, session="mine")
    workers = [replace(P0, tokens_in_flight=70), replace(P1, tokens_in_flight=90)]
    away = [0.0 if each is home_of(b"mine", workers) else MAX_AFFINITY_MS + 70 for each in workers]
    assert sorted(away) == [0.0, MAX_AFFINITY_MS + 70]
    assert AWARE.prefill_costs(request, workers).terms["affinity_ms"] == away


def test_decode_costs_the_exposed_transfer_and_the_gaps_of_the_answer() -> None:
    rates = replace(RATES, kv_bytes_per_token=1e6, links_gb_per_s={"p0": 0.5}, link_gb_per_s=1.0)  # 2 ms, others 1 ms
    workers = [replace(D0, rates=rates, hit_blocks=50), replace(D1, rates=rates, tokens_in_flight=1000)]
    costs = AWARE.decode_costs(REQUEST, workers, replace(P0, tokens_in_flight=10, hit_blocks=40))
    computed_ms = 3201 - 40 * 32
    assert costs.terms["first_token_ms"] == [10.0 + computed_ms] * 2
    assert costs.terms["transfer_ms"] == pytest.approx([2 * 1601 - computed_ms, 2 * 3201 - computed_ms])
    assert costs.terms["answer_ms"] == pytest.approx([100 * (10 + 3.201), 100 * (10 + 4.201)])
    assert costs.totals == pytest.approx([sum(column[place] for column in costs.terms.values()) for place in (0, 1)])
    near = AWARE.decode_costs(REQUEST, workers, P1)
    assert near.terms["transfer_ms"] == [0.0, 0.0], "1601 and 3201 ms are hidden by 3201 ms of computing"


def test_locally_computed_prompt_queues_behind_waiting_ones() -> None:
    busy = replace(D0, pending_prompt_tokens=100, tokens_in_flight=5)
    assert prompt_tokens_per_s(D0) == 1000.0
    assert prompt_tokens_per_s(busy) == CAUTION * 1000.0
    assert prompt_tokens_per_s(replace(busy, rates=replace(RATES, beside_tokens_per_s=400.0))) == 400.0
    costs = AWARE.decode_costs(REQUEST, [busy], None)
    assert costs.terms["wait_ms"] == pytest.approx([100 / CAUTION])
    assert costs.terms["compute_ms"] == pytest.approx([3201 / CAUTION])
    assert costs.terms["answer_ms"] == pytest.approx([100 * token_gap_ms(REQUEST, busy)])


@pytest.mark.parametrize("state", ["tokens_in_flight", "used_slots", "elsewhere_slots", "pending_prompt_tokens"])
def test_any_work_of_a_decode_worker_slows_its_prompts(state: str) -> None:
    assert prompt_tokens_per_s(replace(D0, **{state: 1})) == CAUTION * 1000.0  # type: ignore[arg-type]
    assert prompt_tokens_per_s(replace(P0, **{state: 1})) == 1000.0  # type: ignore[arg-type]


def test_long_prompt_beside_answers_is_expected_to_take_longer_for_each_token() -> None:
    busy = replace(D0, tokens_in_flight=5, rates=replace(RATES, beside_tokens_per_s=400.0))
    long, short = (replace(REQUEST, prompt_tokens=tokens) for tokens in (2048, 128))
    assert expected_here(long, busy).compute_ms > 1.4 * 16 * expected_here(short, busy).compute_ms
    assert expected_here(long, D0).compute_ms == pytest.approx(16 * expected_here(short, D0).compute_ms)


def test_local_prefill_needs_a_wait_and_half_of_the_excess() -> None:
    assert AWARE.local_limit_ms(BUSY_MS, math.inf) is None
    assert AWARE.local_limit_ms(BUSY_MS + 100.0, math.inf) == 100.0 / BUSY_FACTOR


def test_local_limit_rises_where_prefill_workers_put_an_objective_at_risk() -> None:
    assert AWARE.local_limit_ms(450.0, 2000.0) is None, "less than a quarter of the time that is left"
    assert AWARE.local_limit_ms(1500.0, 2000.0) == 1500.0
    assert AWARE.local_limit_ms(3000.0, 2000.0) == 2000.0, "a decode worker that would be late computes nothing"
    assert AWARE.local_limit_ms(BUSY_MS + 100.0, -1.0) == 100.0 / BUSY_FACTOR, "it is late already"


def test_unmeasured_rate_beside_answers_is_assumed_from_their_objective() -> None:
    busy = replace(D0, used_slots=1, rates=replace(RATES, token_gap_ms=20.0))
    assert prompt_tokens_per_s(busy, 50.0) == pytest.approx(MOST_ASSUMED * 0.6 * 1000.0)
    assert prompt_tokens_per_s(busy, 21.0) == CAUTION * 1000.0


def test_loading_hides_behind_the_wait_for_earlier_prompts() -> None:
    """100 blocks of 1 MB at 1 GB/s take 104 ms, behind 46 ms of earlier loading; computing them takes 3 200 ms."""
    loads = replace(P0, tier_blocks=120, tier_block_bytes=10**6, load_bytes_per_s=1e9, loading_ms=46.0)
    assert expected_here(REQUEST, loads) == pytest.approx((0.0, 1.0, 150.0))
    assert expected_here(REQUEST, replace(loads, tokens_in_flight=60)) == pytest.approx((60.0, 1.0, 90.0))
    assert expected_here(REQUEST, replace(loads, tokens_in_flight=200)) == pytest.approx((200.0, 1.0, 0.0))
    slow = replace(loads, load_bytes_per_s=1e7)
    assert expected_here(REQUEST, slow) == pytest.approx((0.0, 3201.0, 0.0)), "it is computed sooner"


def test_equal_costs_take_turns_and_the_least_one_none() -> None:
    assert [cheapest([1.0, 2.0, 1.0], turn) for turn in range(4)] == [0, 2, 0, 2]
    assert [cheapest([3.0, 2.0, 3.0], turn) for turn in range(2)] == [1, 1]


def test_preferred_decode_worker_is_chosen_before_an_idle_one() -> None:
    workers = [P0, replace(D0, tokens_in_flight=10**6), D1]
    placed = [place(replace(REQUEST, preferred_decode=name), workers, make_policy()) for name in (None, "d0", "d9")]
    assert [each.decode for each in placed if isinstance(each, Placement)] == ["d1", "d0", "d1"]


CREDIT = replace(REQUEST, prompt_tokens=64, max_tokens=32, choices=2)  # 2 blocks of prompt, one of each answer: 4
FITS = replace(D0, total_blocks=10, limit_blocks=5, used_blocks=1, total_slots=4, limit_slots=3, used_slots=1)


@pytest.mark.parametrize(
    ("worker", "has_credit"),
    [
        (FITS, True),
        (replace(FITS, used_blocks=2), False),
        (replace(FITS, used_slots=2), False),
        (replace(FITS, total_slots=1), False),
        (replace(FITS, total_blocks=CREDIT.longest_blocks), True),
        (replace(FITS, total_blocks=CREDIT.longest_blocks - 1), False),
        (replace(FITS, total_blocks=3, limit_blocks=3, used_blocks=0), True),  # all of it is ours, and empty
        (replace(FITS, total_blocks=3, limit_blocks=2, used_blocks=0), False),
        (replace(FITS, total_blocks=3, limit_blocks=3, used_blocks=1), False),
    ],
)
def test_credit_covers_a_request_up_to_its_very_bounds(worker: WorkerView, has_credit: bool) -> None:
    assert (CREDIT.charged_blocks, CREDIT.longest_blocks) == (4, 3)
    assert (ineligible(CREDIT, worker) is None) is has_credit


def test_longest_choice_counts_a_window_and_two_blocks_of_windowed_layers() -> None:
    windows = BlockGroups(1, 2, window_tokens=64, block_tokens=32)
    assert replace(REQUEST, prompt_tokens=3200, max_tokens=32, groups=windows).longest_blocks == 101 + 2 * 4
    assert replace(REQUEST, prompt_tokens=64, max_tokens=32, groups=windows).longest_blocks == 3 * 3


@pytest.mark.parametrize(
    ("worker", "why"),
    [
        (replace(FITS, used_blocks=9), NoRoom.NO_CREDIT),
        (replace(FITS, total_blocks=2), NoRoom.TOO_LONG),
        (replace(FITS, total_slots=1), NoRoom.TOO_MANY_CHOICES),
        (P0, NoRoom.NO_DECODE_WORKER),
        (D0, NoRoom.NO_PREFILL_WORKER),
    ],
)
def test_refused_placement_says_why(worker: WorkerView, why: NoRoom) -> None:
    others = [P0] if worker.role is WorkerRole.DECODE and why is not NoRoom.NO_PREFILL_WORKER else []
    assert place(CREDIT, [worker, *others], make_policy(NoPrefillWorker.QUEUE)) is why


@pytest.mark.parametrize("work", [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_worker_stalls_after_its_time_with_any_work_and_no_step(work: tuple[int, int, int]) -> None:
    waiting, running, pending = work
    report = WorkerReport(1, 1, PoolBlocks(1, 1, 0, 0, 0, 0), waiting, running, pending, False, steps=7)
    progress = StallDetector()
    times = (0.0, WITHOUT_A_STEP_S, WITHOUT_A_STEP_S + 0.1)
    assert [progress.stalls(report, now) for now in times] == [False, False, True]
    assert not progress.stalls(replace(report, steps=8), times[2])
    idle = replace(report, waiting_requests=0, running_sequences=0, pending_tokens=0, steps=8)
    assert not progress.stalls(idle, 100.0)
    assert not progress.stalls(replace(report, steps=8), 100.0 + WITHOUT_A_STEP_S), "its time begins with its work"


def test_pair_is_quarantined_at_the_third_failure_for_a_time() -> None:
    breaker, pair = PairCircuitBreaker(), ("p", "d")
    for _ in range(2):
        breaker.failed(pair, 0.0)
    assert breaker.broken(0.0) == frozenset()
    breaker.failed(pair, 0.0)
    assert [set(breaker.broken(now)) for now in (4.9, 5.0)] == [{pair}, set()]
    breaker.failed(pair, 4.9)  # under way when it was set aside: counts for nothing more
    assert breaker.broken(5.0) == frozenset()
    breaker.failed(pair, 5.0)
    assert [set(breaker.broken(now)) for now in (14.9, 15.0)] == [{pair}, set()]
    for _ in range(2):
        breaker.succeeded(pair)
    breaker.failed(pair, 20.0)  # the third success would have cleared it
    assert [set(breaker.broken(now)) for now in (39.9, 40.0)] == [{pair}, set()]


def test_one_success_clears_a_pair_that_was_never_set_aside() -> None:
    breaker, pair = PairCircuitBreaker(), ("p", "d")
    for _ in range(3):
        breaker.failed(pair, 0.0)
        breaker.succeeded(pair)
        breaker.failed(pair, 0.0)
        breaker.succeeded(pair)
    assert breaker.broken(0.0) == frozenset()


def test_loading_of_a_prompt_that_was_computed_is_charged_no_longer() -> None:
    charges = Charges()
    charges.add(1, AttemptCharge(10, prompt_tokens=100, load_ms=30.0))
    charges.add(2, AttemptCharge(20, prompt_tokens=200, load_ms=40.0))
    charges.prompt_computed(1)
    assert (charges.tokens, charges.prompt_tokens, charges.load_ms) == (30, 200, 40.0)
    charges.release(1)
    assert (charges.tokens, charges.prompt_tokens, charges.load_ms) == (20, 200, 40.0)
    charges.release(2)
    assert (charges.tokens, charges.prompt_tokens, charges.load_ms) == (0, 0, 0.0)


def test_recent_work_fades_by_e_with_a_window_of_work_given_to_any_worker() -> None:
    work = RecentWork()
    work.add("a", 1000, tokens_per_s=100.0)
    work.add("b", 1500, tokens_per_s=100.0)
    assert work.of("a") == pytest.approx(1000 / 2.718281828)
    assert work.of("b") == 1500.0
    work.add("a", 0, tokens_per_s=100.0)
    assert work.of("a") == pytest.approx(1000 / 2.718281828)


def test_rates_weigh_measurements_by_size_and_decay() -> None:
    ratio = Ratio()
    assert ratio.value(unknown=7.0, prior=1.0) == 7.0
    ratio.add(10.0, 1.0)
    ratio.add(10.0, 3.0)
    assert ratio.value(7.0) == pytest.approx(19.0 / 3.9)
    assert ratio.value(7.0, prior=2.0) == pytest.approx((19.0 + 14.0) / 5.9)
    ratio.age()
    assert ratio.value(7.0, prior=2.0) == pytest.approx((0.98 * 19.0 + 14.0) / (0.98 * 3.9 + 2.0))


def test_line_of_gaps_is_least_squares_with_a_slope_only_where_loads_differed() -> None:
    line = DecayingLine()
    assert line.fit(3.0, 0.5) == (3.0, 0.5)
    line.add(100.0, 20.0)
    assert line.fit(3.0, 0.05) == (15.0, 0.05), "the slope that is given, through what was measured"
    assert line.fit(3.0, 0.5) == (0.0, 0.2), "no base is negative"
    line.add(200.0, 30.0)
    assert line.fit(3.0, 0.5) == pytest.approx((10.0, 0.1))
