"""What a sum is held against is the first sum of the same block, and of no other."""

from baton.worker.at_rest.sums import KnownSums, RestCounters


def test_first_checksum_is_the_reference_of_later_ones() -> None:
    known = KnownSums()
    assert [known.matches(b"a", each) for each in (5, 5, 6)] == [True, True, False]
    assert known.counters == RestCounters(checked_at_rest_blocks=2, corrupt_at_rest_blocks=1)


def test_corrupt_block_is_dropped_recomputed_and_tracked_again() -> None:
    known = KnownSums()
    known.learn(b"a", 5)
    assert not known.matches(b"a", 6)
    assert known.matches(b"a", 7)
    assert known.counters == RestCounters(checked_at_rest_blocks=1, corrupt_at_rest_blocks=1)


def test_later_sum_of_somebody_else_changes_nothing() -> None:
    known = KnownSums()
    known.learn(b"a", 5)
    known.learn(b"a", 6)
    assert known.matches(b"a", 5)


def test_evicted_block_is_forgotten() -> None:
    known = KnownSums()
    known.learn(b"a", 5)
    known.learn(b"b", 5)
    known.forget((b"a", b"c"))
    assert len(known) == 1
    assert known.matches(b"a", 6)
    assert known.counters == RestCounters()
