"""How a decode worker deals itself out to its routers."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.decode_worker.credits import Charge, Credits, WorkerCredits
from baton.router.types.placement import PlacementRequest
from baton.worker.wire import Limit

BOTH = frozenset({"a", "b"})


def test_single_router_gets_all_credit_immediately() -> None:
    assert Credits[str](10).deal({}, frozenset({"a"})) == {"a": 10}


def test_unused_credit_is_shared_equally_and_used_credit_stays() -> None:
    credits = Credits[str](10)
    credits.deal({"a": 6}, BOTH)
    assert credits.deal({"a": 6}, BOTH) == {"a": 8, "b": 2}


def test_router_gets_all_but_the_shares_of_idle_routers() -> None:
    """Half a worker does not stand empty because another router has no requests."""
    credits = Credits[str](16)
    used = 0
    for _ in range(12):
        used = credits.deal({"a": used}, BOTH)["a"]  # it takes whatever it gets
    assert used == 15


def test_disconnected_router_keeps_its_credit_and_gets_no_more() -> None:
    credits = Credits[str](10)
    credits.deal({"a": 4}, frozenset({"b"}))
    assert credits.deal({"a": 4}, frozenset({"b"})) == {"b": 6}


def test_worker_charges_as_the_router_does() -> None:
    assert Charge.of(prompt_tokens=70, max_tokens=1000, slots=2, block_tokens=32) == Charge(2 + 2 * 9, 2)
    chance = random.Random(4)
    for _ in range(200):
        prompt_tokens, max_tokens, choices = chance.randint(1, 900), chance.randint(1, 600), chance.randint(1, 8)
        block_tokens = chance.choice([4, 16, 32])
        counted = PlacementRequest(b"", block_tokens, prompt_tokens, max_tokens, choices).charged_blocks
        assert Charge.of(prompt_tokens, max_tokens, choices, block_tokens) == Charge(counted, choices)


@settings(max_examples=60, deadline=None)
@given(total=st.integers(1, 64), seed=st.integers(0, 2**16), routers=st.integers(2, 4))
def test_routers_within_their_limits_never_exceed_the_total(total: int, seed: int, routers: int) -> None:
    """Each router fills up to the newest limit that it has heard, also just before it hears a lower one."""
    chance, credits = random.Random(seed), Credits[str](total)
    names = frozenset(map(str, range(routers)))
    used = dict.fromkeys(names, 0)
    heard = dict.fromkeys(names, 0)
    for _ in range(40):
        lent = {chance.choice(sorted(names)): chance.randint(0, 2 * total)} if chance.random() < 0.5 else {}
        limits = credits.deal({name: count for name, count in used.items() if count}, names, lent)
        assert sum(limits.values()) <= total
        for name in names:
            used[name] = max(used[name], chance.randint(0, heard[name]))  # dispatched before this report came
        assert sum(used.values()) <= total
        heard = limits
        for name in names:
            used[name] = chance.choice((used[name], max(used[name], heard[name]), chance.randint(0, used[name])))
        assert sum(used.values()) <= total


def test_unused_credit_is_lent() -> None:
    credits = Credits[str](10)
    credits.deal({}, BOTH)
    assert credits.deal({}, BOTH, {"a": 8}) == {"a": 5, "b": 2}, "b may still use what it was told before"
    assert credits.deal({}, BOTH, {"a": 8}) == {"a": 8, "b": 2}
    assert credits.deal({"a": 8}, BOTH) == {"a": 8, "b": 1}, "what is used stays, and the rest is shared as ever"
    for _ in range(3):
        limits = credits.deal({}, BOTH)
    assert limits == {"a": 5, "b": 5}


def test_used_credit_is_lent_as_it_is_released() -> None:
    credits = Credits[str](10)
    credits.deal({"b": 5}, BOTH)
    for used, limit in ((5, 3), (5, 5), (3, 5), (3, 7), (1, 7), (1, 9)):
        assert credits.deal({"b": used}, BOTH, {"a": 9})["a"] == limit


def test_loans_never_exceed_the_total() -> None:
    credits = Credits[str](10)
    for _ in range(3):
        limits = credits.deal({"a": 2}, BOTH, {"a": 30})
    assert limits == {"a": 10, "b": 0}


def test_router_with_more_than_it_wants_keeps_its_share() -> None:
    credits = Credits[str](10)
    for _ in range(3):
        limits = credits.deal({}, BOTH, {"a": 3})
    assert limits == {"a": 5, "b": 5}


def test_blocks_and_slots_of_all_requests_of_a_router_count_and_a_loan_of_both() -> None:
    credits: WorkerCredits[str] = WorkerCredits(total_blocks=100, total_slots=10)
    here = [("a", Charge(30, 2)), ("a", Charge(10, 1)), ("b", Charge(5, 1))]
    credits.deal(here, BOTH, now=0.0)
    assert credits.deal(here, BOTH, now=1.0) == {"a": Limit(67, 6), "b": Limit(33, 4)}, "half of 55 and of 6 more"
    credits.loans.ask("b", Charge(50, 4))
    credits.deal(here, BOTH, now=2.0)
    assert credits.deal(here, BOTH, now=3.0)["b"] == Limit(55, 5)


def test_odd_unit_goes_to_the_router_with_least() -> None:
    credits = Credits[int](10)
    present = frozenset({1, 2})
    credits.deal({1: 3, 2: 2}, present)
    assert credits.deal({1: 3, 2: 2}, present) == {1: 5, 2: 5}
    credits.deal({1: 2, 2: 3}, present)
    assert credits.deal({1: 2, 2: 3}, present) == {1: 5, 2: 5}
