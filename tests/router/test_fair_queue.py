"""Whose turn it is: shares, classes, and what every order of arrivals keeps."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.admission.fair_queue import MAX_AHEAD_TOKENS, SPARE_SHARE, Entry, FairQueue

MOST_TOKENS = 50
TOKENS = st.integers(1, MOST_TOKENS)
ARRIVALS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from((-1, 0, 2)), TOKENS), max_size=40)


def head(queue: FairQueue[int]) -> Entry[int]:
    return next(queue.order())


def serve(queue: FairQueue[int]) -> Entry[int]:
    entry = head(queue)
    queue.take(entry)
    return entry


def filled(arrivals: list[tuple[str, int, int]]) -> FairQueue[int]:
    queue: FairQueue[int] = FairQueue()
    for item, (tenant, priority, tokens) in enumerate(arrivals):
        queue.add(item, tenant, priority, tokens)
    return queue


@settings(max_examples=100, deadline=None)
@given(ARRIVALS)
def test_every_request_is_served_once_and_a_tenants_in_order(arrivals: list[tuple[str, int, int]]) -> None:
    queue = filled(arrivals)
    assert sorted(entry.item for entry in queue.order()) == list(range(len(arrivals)))
    served = [serve(queue) for _ in arrivals]
    assert sorted(entry.item for entry in served) == list(range(len(arrivals)))
    for key in {(entry.tenant, entry.priority) for entry in served}:
        items = [entry.item for entry in served if (entry.tenant, entry.priority) == key]
        assert items == sorted(items)
    assert (len(queue), list(queue.order()), queue.newest_of_largest()) == (0, [], None)


@settings(max_examples=100, deadline=None)
@given(st.lists(TOKENS, min_size=30, max_size=30), st.lists(TOKENS, min_size=30, max_size=30), st.integers(1, 30))
def test_two_tenants_that_wait_all_the_while_are_served_equally(one: list[int], other: list[int], turns: int) -> None:
    """Within the largest request of each."""
    queue = filled([("one", 0, tokens) for tokens in one] + [("other", 0, tokens) for tokens in other])
    tokens: Counter[str] = Counter()
    for _ in range(turns):
        entry = serve(queue)
        tokens[entry.tenant] += entry.tokens
        assert abs(tokens["one"] - tokens["other"]) <= 2 * MOST_TOKENS


def test_tenant_at_two_routers_gets_the_share_of_a_tenant_at_one() -> None:
    first = filled([("wide", 0, 10)] * 40)
    second = filled([("wide", 0, 10), ("narrow", 0, 10)] * 40)
    served: Counter[str] = Counter()
    for _ in range(30):
        for queue, other in ((first, second), (second, first)):
            entry = serve(queue)
            other.charge(entry.tenant, entry.tokens)
            served[entry.tenant] += entry.tokens
    assert abs(served["wide"] - served["narrow"]) <= 2 * 10


def test_tenant_served_elsewhere_waits_for_a_bounded_number_of_tokens() -> None:
    queue = filled([("one", 0, 1_000)] * 100 + [("other", 0, 1_000)] * 100)
    queue.charge("one", 1 << 40)
    turns = [serve(queue).tenant for _ in range(80)]
    assert 60 <= turns.index("one") <= MAX_AHEAD_TOKENS // 1_000 + 1


def test_tenant_charged_before_it_arrives_starts_later() -> None:
    queue = filled([("one", 0, 10)] * 3)
    queue.charge("other", 15)
    queue.add(9, "other", 0, 10)
    assert [serve(queue).tenant for _ in range(4)] == ["one", "one", "other", "one"]


def test_late_tenant_neither_saved_up_nor_lost() -> None:
    queue = filled([("noisy", 0, 10)] * 20)
    for _ in range(10):
        serve(queue)
    for item in (100, 101):
        queue.add(item, "late", 0, 10)
    assert [serve(queue).tenant for _ in range(4)] in (
        ["noisy", "late", "noisy", "late"],
        ["late", "noisy", "late", "noisy"],
        ["noisy", "late", "late", "noisy"],
    )


def test_equal_tenants_are_served_by_arrival_and_the_one_behind_catches_up() -> None:
    queue = filled([("b", 0, 10), ("a", 0, 10), ("a", 0, 10), ("b", 0, 30), ("a", 0, 10), ("a", 0, 10)])
    assert [entry.item for entry in queue.order()] == [0, 1, 2, 3, 4, 5]
    assert [serve(queue).item for _ in range(6)] == [0, 1, 2, 3, 4, 5]


def test_tenant_that_was_served_last_does_not_win_by_leaving() -> None:
    """Its virtual time is remembered while it is ahead of the clock, and no longer."""
    queue = filled([("a", 0, 100), ("b", 0, 10), ("b", 0, 10), ("b", 0, 10)])
    assert serve(queue).tenant == "a"
    queue.add(9, "a", 0, 10)
    assert [serve(queue).tenant for _ in range(4)] == ["b", "b", "b", "a"]


def test_full_queue_gives_up_the_newest_request_of_the_tenant_with_most() -> None:
    queue = filled([("a", 0, 10), ("b", 2, 10), ("a", 5, 10), ("a", 0, 10), ("b", 0, 10)])
    newest = queue.newest_of_largest()
    assert newest is not None and newest.item == 3


def test_spare_share_goes_to_the_class_whose_oldest_request_waits_longest() -> None:
    """Nine tokens in ten go to the first class: after 90 of its tokens there are 10 for another one."""
    queue = filled([("a", 5, 10), ("a", 3, 10), *[("a", 0, 30)] * 6])
    assert [serve(queue).priority for _ in range(8)] == [0, 0, 0, 5, 0, 0, 0, 3]


def test_spare_tokens_are_not_saved_up_while_one_class_waits_alone() -> None:
    queue = filled([("a", 5, 10), *[("a", 0, 30)] * 3])
    assert [serve(queue).priority for _ in range(4)] == [0, 0, 0, 5]
    for item, priority in enumerate((0, 0, 5)):
        queue.add(item, "a", priority, 10)
    assert [serve(queue).priority for _ in range(3)] == [0, 0, 5]


def test_tokens_ahead_count_earlier_classes_and_others_served_first() -> None:
    queue = filled([("a", 0, 10), ("a", 0, 20), ("b", 0, 40), ("c", -1, 5)])
    assert queue.tokens_ahead("a", 0) == 5 + 30 + 40, "its own, and b's, whose turn comes before a's third"
    assert queue.tokens_ahead("d", 0) == 5 + 10 + 40, "of each tenant the first one: as far as they have come"
    assert queue.tokens_ahead("d", -1) == 5 / (1 - SPARE_SHARE), "later classes take their share meanwhile"
    assert queue.tokens_ahead("d", -2) == 0.0


def test_withdrawn_request_costs_its_tenant_nothing() -> None:
    queue = filled([("a", 0, 10), ("b", 0, 10), ("a", 0, 10)])
    big = queue.add(9, "b", 0, 1000)
    queue.withdraw(big)
    queue.add(10, "b", 0, 10)
    assert [serve(queue).tenant for _ in range(4)] == ["a", "b", "a", "b"]


def test_coming_and_going_does_not_win_turns() -> None:
    """Whoever leaves the queue for a moment is not forgotten while the others have not caught up."""
    queue = filled([("patient", 0, 10)] * 10)
    queue.add(100, "nimble", 0, 10)
    tokens: Counter[str] = Counter()
    for _ in range(10):
        entry = serve(queue)
        tokens[entry.tenant] += 1
        if entry.tenant == "nimble":
            queue.add(100, "nimble", 0, 10)
    assert tokens == {"patient": 5, "nimble": 5}


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), TOKENS)
def test_no_class_starves_however_many_earlier_ones_keep_coming(later: int, tokens: int) -> None:
    queue: FairQueue[int] = FairQueue()
    last = queue.add(-1, "low", later, tokens)
    for turn in range(1000):
        queue.add(turn, "high", 0, 10)
        if serve(queue) is last:
            break
    # So much of the earlier class goes before it as makes its share up.
    assert turn * 10 <= tokens * (1 - SPARE_SHARE) / SPARE_SHARE + 10


@settings(max_examples=100, deadline=None)
@given(ARRIVALS, st.tuples(st.sampled_from("abcd"), st.sampled_from((-1, 0, 2)), TOKENS))
def test_another_waiting_request_never_reduces_tokens_ahead(
    arrivals: list[tuple[str, int, int]], one_more: tuple[str, int, int]
) -> None:
    queue = filled(arrivals)
    before = {(name, level): queue.tokens_ahead(name, level) for name in "abcd" for level in (-1, 0, 2)}
    queue.add(99, *one_more)
    assert all(queue.tokens_ahead(*key) >= ahead for key, ahead in before.items())


def test_quiet_tenant_does_not_wait_for_a_noisy_one() -> None:
    queue = filled([("noisy", 0, 10)] * 50)
    assert queue.tokens_ahead("quiet", 0) <= 10 < 500 == queue.tokens_ahead("noisy", 0)


def test_tenant_above_its_share_is_not_ahead_of_a_new_one() -> None:
    queue = filled([("greedy", 0, 1000), ("greedy", 0, 10)])
    serve(queue)
    assert queue.tokens_ahead("new", 0) == 0
