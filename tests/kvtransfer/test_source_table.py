"""Every transfer here is `A` of request 7, with a lease of 5 s, parking of 2 s and tombstones of 60 s."""

import pytest

from baton.kvtransfer.source import CloseVerdict, OpenVerdict, SourceCounters, SourceTable
from baton.kvtransfer.transport import UnknownTransfer

A, B = b"A" * 16, b"B" * 16
REQUEST = 7


@pytest.fixture
def table() -> SourceTable[int, str]:
    return SourceTable(lease_s=5.0, park_s=2.0, tombstone_s=60.0)


def finished(table: SourceTable[int, str], now: float) -> None:
    """Announced, computed, read by nobody."""
    assert table.announce(A, REQUEST, now)
    table.advance(A, (4, 2), now)
    table.finish(A, ("first",), now)


def test_reader_follows_the_watermark_to_the_end(table):
    table.announce(A, REQUEST, 0.0)
    assert table.open(A, 0.0) is OpenVerdict.OPENED
    assert table.snapshot(A).watermark_blocks == 0
    table.advance(A, (4, 2), 1.0)
    table.advance(A, (9,), 2.0)
    state = table.snapshot(A)
    assert (state.blocks, state.watermark_blocks, state.finished, state.dropped) == ((4, 2, 9), 3, False, False)
    table.finish(A, ("first",), 3.0)
    state = table.snapshot(A)
    assert state.finished
    assert state.first_tokens == ("first",)


def test_complete_read_of_a_finished_transfer_is_valid_and_unpins(table):
    finished(table, 0.0)
    table.open(A, 0.0)
    assert table.close(A, complete=True, now=1.0) == CloseVerdict(valid=True, owner=REQUEST)
    assert len(table) == 0
    assert table.counters == SourceCounters(expired=0, stale=0)


def test_complete_read_is_not_valid_before_the_end(table):
    table.announce(A, REQUEST, 0.0)
    table.open(A, 0.0)
    table.advance(A, (4,), 0.0)
    assert table.close(A, complete=True, now=1.0) == CloseVerdict(valid=False, owner=REQUEST)


def test_reader_that_gives_up_unpins_and_is_not_counted_as_stale(table):
    finished(table, 0.0)
    table.open(A, 0.0)
    assert table.close(A, complete=False, now=1.0) == CloseVerdict(valid=False, owner=REQUEST)
    assert table.counters.stale == 0


def test_second_close_is_stale_and_releases_nothing(table):
    finished(table, 0.0)
    table.close(A, complete=True, now=1.0)
    assert table.close(A, complete=True, now=1.0) == CloseVerdict(valid=False, owner=None)


def test_closing_an_unknown_transfer_is_stale(table):
    assert table.close(A, complete=True, now=0.0) == CloseVerdict(valid=False, owner=None)
    assert table.counters.stale == 1


def test_block_dropped_during_a_read_is_stale(table):
    finished(table, 0.0)
    table.open(A, 0.0)
    table.drop(A, 1.0)
    assert table.snapshot(A).dropped
    assert table.close(A, complete=True, now=2.0) == CloseVerdict(valid=False, owner=None)
    assert table.counters.stale == 1


def test_reader_is_told_while_its_blocks_are_pinned(table):
    table.open(A, 0.0)
    assert not table.confirm(A).valid, "it is parked: there are no blocks"
    table.announce(A, REQUEST, 0.0)
    table.advance(A, (4, 2), 1.0)
    assert table.confirm(A) == CloseVerdict(True, REQUEST)
    table.drop(A, 2.0)
    assert table.confirm(A) == CloseVerdict(False, None)


def test_id_is_used_once(table):
    table.announce(A, REQUEST, 0.0)
    assert not table.announce(A, 8, 0.0)
    table.close(A, complete=False, now=0.0)
    assert not table.announce(A, 8, 0.0)
    assert table.open(A, 0.0) is OpenVerdict.REFUSED


def test_reader_that_closed_first_stops_the_prompt(table):
    table.close(A, complete=False, now=0.0)
    assert not table.announce(A, REQUEST, 1.0)


def test_cancel_that_came_first_stops_the_prompt(table):
    table.drop(A, 0.0)
    assert not table.announce(A, REQUEST, 1.0)


def test_tombstones_are_forgotten_in_the_end(table):
    table.drop(A, 0.0)
    table.expired(59.0)
    assert table.open(A, 59.0) is OpenVerdict.REFUSED
    table.expired(60.0)
    assert table.announce(A, REQUEST, 60.0)


def test_transfer_has_one_reader_at_a_time(table):
    table.announce(A, REQUEST, 0.0)
    table.open(A, 0.0)
    assert table.open(A, 0.0) is OpenVerdict.REFUSED


def test_early_reader_is_parked_until_the_announcement(table):
    assert table.open(A, 0.0) is OpenVerdict.PARKED
    state = table.snapshot(A)
    assert (state.announced, state.dropped) == (False, False)
    assert table.announce(A, REQUEST, 1.0)
    assert table.snapshot(A).announced
    assert table.expired(1000.0) == []


def test_parking_ends_and_then_the_prompt_is_not_wanted(table):
    table.open(A, 0.0)
    assert table.expired(1.9) == []
    assert not table.snapshot(A).dropped
    assert table.expired(2.0) == []
    assert table.snapshot(A).dropped
    assert not table.announce(A, REQUEST, 2.0)
    assert table.counters.expired == 0


def test_returning_parked_reader_keeps_its_original_bound(table):
    table.open(A, 0.0)
    table.reader_lost(A, 1.0)
    assert table.open(A, 1.5) is OpenVerdict.PARKED
    table.expired(2.0)
    assert table.snapshot(A).dropped


def test_parked_reader_that_went_leaves_a_lease_to_the_announcement(table):
    table.open(A, 0.0)
    table.reader_lost(A, 1.0)
    assert table.announce(A, REQUEST, 1.0)
    assert table.expired(5.9) == []
    assert table.expired(6.0) == [REQUEST]


def test_no_lease_runs_while_somebody_reads(table):
    finished(table, 0.0)
    table.open(A, 4.0)
    assert table.expired(1000.0) == []
    assert table.close(A, complete=True, now=1000.0).valid


def test_no_lease_runs_before_the_first_blocks(table):
    table.announce(A, REQUEST, 0.0)
    assert table.expired(1000.0) == []


def test_lease_of_the_newest_blocks_expires_without_a_reader(table):
    table.announce(A, REQUEST, 0.0)
    table.advance(A, (4,), 10.0)
    table.advance(A, (2,), 13.0)
    assert table.expired(15.0) == []
    table.finish(A, (), 16.0)
    assert table.expired(20.9) == []
    assert table.expired(21.0) == [REQUEST]
    assert table.expired(22.0) == []
    assert table.counters.expired == 1


def test_lost_reader_has_one_lease_to_return(table):
    finished(table, 0.0)
    table.open(A, 1.0)
    table.reader_lost(A, 100.0)
    assert table.expired(104.9) == []
    assert table.open(A, 104.9) is OpenVerdict.OPENED
    table.reader_lost(A, 200.0)
    assert table.expired(205.0) == [REQUEST]
    assert table.close(A, complete=True, now=206.0) == CloseVerdict(valid=False, owner=None)


def test_lease_of_a_lost_reader_does_not_grow_with_new_blocks(table):
    table.announce(A, REQUEST, 0.0)
    table.open(A, 0.0)
    table.reader_lost(A, 1.0)
    table.advance(A, (4,), 5.0)
    assert table.expired(6.0) == [REQUEST]


def test_losing_the_reader_of_an_ended_transfer_means_nothing(table):
    finished(table, 0.0)
    table.open(A, 0.0)
    table.close(A, complete=True, now=1.0)
    table.reader_lost(A, 1.0)
    assert table.snapshot(A).dropped
    assert len(table) == 0


def test_transfers_do_not_touch_each_other(table):
    finished(table, 0.0)
    table.announce(B, 8, 0.0)
    table.advance(B, (5,), 3.0)
    assert table.expired(5.0) == [REQUEST]
    assert table.snapshot(B).blocks == (5,)


def test_nothing_advances_without_an_announcement(table):
    with pytest.raises(UnknownTransfer):
        table.advance(A, (1,), 0.0)
    table.open(A, 0.0)
    with pytest.raises(UnknownTransfer):
        table.finish(A, (), 0.0)


def test_nothing_advances_after_the_end(table):
    finished(table, 0.0)
    with pytest.raises(ValueError, match="finished"):
        table.advance(A, (1,), 0.0)
    table.drop(A, 0.0)
    with pytest.raises(UnknownTransfer) as unknown:
        table.advance(A, (1,), 0.0)
    assert A.hex() not in str(unknown.value)  # whoever has the id may read
