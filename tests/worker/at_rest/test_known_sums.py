"""What a sum is held against is the first sum of the same block, and of no other."""

from baton.worker.at_rest.sums import KnownSums, RestCounters


def test_the_first_sum_is_what_later_ones_are_held_against() -> None:
    known = KnownSums()
    assert [known.matches(b"a", each) for each in (5, 5, 6)] == [True, True, False]
    assert known.counters == RestCounters(checked_at_rest_blocks=2, corrupt_at_rest_blocks=1)


def test_what_was_corrupt_is_dropped_and_computed_and_begins_anew() -> None:
    known = KnownSums()
    known.learn(b"a", 5)
    assert not known.matches(b"a", 6)
    assert known.matches(b"a", 7)
    assert known.counters == RestCounters(checked_at_rest_blocks=1, corrupt_at_rest_blocks=1)


def test_a_later_sum_of_somebody_else_changes_nothing() -> None:
    known = KnownSums()
    known.learn(b"a", 5)
    known.learn(b"a", 6)
    assert known.matches(b"a", 5)


def test_what_left_the_cache_is_forgotten() -> None:
    known = KnownSums()
    known.learn(b"a", 5)
    known.learn(b"b", 5)
    known.forget((b"a", b"c"))
    assert len(known) == 1
    assert known.matches(b"a", 6)
    assert known.counters == RestCounters()
