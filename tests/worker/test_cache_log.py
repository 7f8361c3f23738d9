"""What routers are told of a cache: numbered, bounded, and enough to check the sum by."""

from functools import reduce

from baton.engine.kv_cache.block_pool import CacheChanges
from baton.router.cache.wire import snapshot_part
from baton.worker.cache_events import CacheLog

HASHES = [bytes([number]) * 32 for number in range(1, 9)]


def digest(*hashes: bytes) -> int:
    return reduce(lambda sum_, each: sum_ ^ int.from_bytes(each[:8], "little"), hashes, 0)


def test_step_is_one_message_and_messages_count_from_one() -> None:
    log = CacheLog()
    [first] = log.record(CacheChanges(tuple(HASHES[:3]), ()))
    [second] = log.record(CacheChanges((HASHES[3],), (HASHES[0],)))
    assert (first.sequence, second.sequence, log.sequence) == (1, 2, 2)
    assert (second.stored, second.evicted) == (HASHES[3], HASHES[0])


def test_oversized_update_is_split_into_several_messages() -> None:
    log = CacheLog(message_hashes=3)
    log.record(CacheChanges(tuple(HASHES[:4]), ()))
    messages = log.record(CacheChanges(tuple(HASHES[4:]), tuple(HASHES[:4])))
    assert [len(each.stored) + len(each.evicted) for each in messages] == [96, 96, 64]
    assert [each.sequence for each in messages] == [3, 4, 5]
    assert b"".join(each.stored for each in messages) == b"".join(HASHES[4:])


def test_checksum_covers_present_blocks() -> None:
    log = CacheLog()
    log.record(CacheChanges(tuple(HASHES[:3]), ()))
    log.record(CacheChanges((HASHES[1],), (HASHES[0], HASHES[7])))  # one was there, one never was
    assert (log.blocks, log.digest) == (2, digest(HASHES[1], HASHES[2]))


def test_snapshot_has_everything_in_bounded_parts() -> None:
    log = CacheLog(message_hashes=3)
    [empty] = log.snapshot()
    assert (empty.sequence, empty.part, empty.parts, empty.hashes) == (0, 0, 1, b"")
    log.record(CacheChanges(tuple(HASHES[:7]), ()))
    parts = log.snapshot()
    assert [(each.part, each.parts, len(each.hashes)) for each in parts] == [(0, 3, 96), (1, 3, 96), (2, 3, 32)]
    assert {each.sequence for each in parts} == {3}
    assert {block for each in parts for block in snapshot_part(each).hashes} == set(HASHES[:7])
