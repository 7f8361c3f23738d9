"""The index of the tier: the first place of a name counts, a dropped segment is forgotten, a million blocks fit."""

import hashlib
import tracemalloc

from baton.kvtransfer.tier.index import SegmentSlot, TierIndex

NAMES = [hashlib.sha256(bytes([number])).digest() for number in range(10)]
BYTES_PER_BLOCK = 150


def test_name_is_found_where_it_was_added_first() -> None:
    index = TierIndex()
    index.add(1, NAMES[0])
    index.add(1, NAMES[1])
    index.add(2, NAMES[1])
    assert (index.find(NAMES[1]), index.find(NAMES[2]), len(index)) == (SegmentSlot(1, 1), None, 2)


def test_known_counts_from_the_first_name_on() -> None:
    index = TierIndex()
    for number in (0, 1, 3):
        index.add(1, NAMES[number])
    assert (index.known(NAMES), index.known(NAMES[1:2]), index.known(NAMES[2:]), index.known([])) == (2, 1, 0, 0)


def test_damaged_record_takes_a_place_and_no_name() -> None:
    index = TierIndex()
    index.add(1, None)
    index.add(1, NAMES[0])
    assert (index.find(NAMES[0]), index.slots(1), len(index)) == (SegmentSlot(1, 1), 2, 1)


def test_dropping_a_segment_keeps_blocks_of_others() -> None:
    index = TierIndex()
    index.add(1, NAMES[0])
    index.add(2, NAMES[0])
    index.add(2, NAMES[1])
    assert index.drop(2) == 1
    assert (index.find(NAMES[0]), index.find(NAMES[1]), index.slots(2)) == (SegmentSlot(1, 0), None, 0)
    assert index.drop(2) == 0


def test_forgotten_block_can_be_added_again() -> None:
    index = TierIndex()
    index.add(1, NAMES[0])
    index.forget(NAMES[0])
    assert index.find(NAMES[0]) is None
    index.add(2, NAMES[0])
    assert (index.find(NAMES[0]), index.drop(1), len(index)) == (SegmentSlot(2, 0), 0, 1)


def test_million_blocks_take_less_memory_than_stated() -> None:
    blocks = 100_000
    names = [hashlib.sha256(number.to_bytes(4, "little")).digest() for number in range(blocks)]
    tracemalloc.start()
    index = TierIndex()
    for number, name in enumerate(names):
        index.add(number // 10_000, name)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken / blocks < BYTES_PER_BLOCK
