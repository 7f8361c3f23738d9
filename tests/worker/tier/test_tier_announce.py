"""What a worker tells routers of its own files: each record once, segments gone as a whole, everything on demand."""

from collections.abc import Mapping
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.protos import cache_pb2
from baton.router.cache.tiers import TierDirectories
from baton.router.cache.wire import tier_changes, tier_snapshot_part
from baton.worker.tier.announce import NAME_BYTES, FilesLog
from tests.fixtures.tier_blocks import name_of, named_blocks, store_in
from tests.fixtures.tier_reports import tier_report


class Files:
    """Segments of numbered names; as the index of a store has them."""

    def __init__(self) -> None:
        self.segments: dict[int, list[int]] = {}

    def own_slots(self) -> Mapping[int, int]:
        return {number: len(names) for number, names in self.segments.items()}

    def own_names(self, number: int, first: int, count: int) -> bytes:
        names = self.segments.get(number, [])[first : first + count]
        return b"".join(name_of(each)[:NAME_BYTES] for each in names)


def known(tiers: TierDirectories, numbers: range) -> set[int]:
    return {each for each in numbers if tiers.behind([name_of(each)], {"w": 0})}


def test_messages_are_bounded_and_a_large_tier_is_announced_over_several() -> None:
    files, log = Files(), FilesLog(message_names=4)
    files.segments = {1: list(range(10)), 2: list(range(10, 13))}
    first = list(log.changes(files, most=2))
    assert [sum(len(piece.names) for piece in each.stored) for each in first] == [32, 32]
    rest = list(log.changes(files))
    assert [(piece.segment, piece.first_slot) for each in rest for piece in each.stored] == [(1, 8), (2, 0), (2, 2)]
    assert [each.sequence for each in (*first, *rest)] == [1, 2, 3, 4]
    assert list(log.changes(files)) == []


def test_removed_segment_is_announced_by_number_before_new_blocks() -> None:
    files, log = Files(), FilesLog()
    files.segments = {1: [1], 2: [2]}
    assert len(list(log.changes(files))) == 1
    files.segments = {2: [2, 3]}
    (change,) = log.changes(files)
    assert change.removed_segments == [1]
    assert change.stored == [cache_pb2.TierPiece(segment=2, first_slot=1, names=name_of(3)[:NAME_BYTES])]
    del files.segments[2]
    assert [(list(each.removed_segments), list(each.stored)) for each in log.changes(files)] == [([2], [])]


def test_snapshot_equals_the_announced_blocks() -> None:
    files, log = Files(), FilesLog(message_names=2)
    assert log.snapshot(files) == [cache_pb2.TierSnapshot(parts=1)]
    files.segments = {7: [1, 2, 3]}
    list(log.changes(files))
    files.segments[7].append(4)
    parts = log.snapshot(files)
    assert [(part.part, part.parts, part.sequence) for part in parts] == [(0, 2, 2), (1, 2, 2)]
    assert b"".join(piece.names for part in parts for piece in part.stored) == files.own_names(7, 0, 3)


steps = st.lists(st.sampled_from(["write", "write", "segment", "remove", "tell", "lose", "connect"]), max_size=60)


@settings(max_examples=150, deadline=None)
@given(steps, st.integers(1, 5))
def test_following_router_knows_the_blocks_of_the_files(work: list[str], message_names: int) -> None:
    """Whatever is written, removed, told, lost on the way, and asked for again."""
    files, log, tiers, number, now = Files(), FilesLog(message_names), TierDirectories(), 0, 0.0
    report = tier_report(b"d" * 16)
    tiers.check("w", "w-0", report, now)
    for step in (*work, "tell", "connect"):
        now += 2.0
        if step == "segment" or not files.segments:
            files.segments[max(files.segments, default=0) + 1] = []
        if step == "write":
            files.segments[max(files.segments)].append(number)
            number += 1
        elif step == "remove" and len(files.segments) > 1:
            del files.segments[min(files.segments)]
        elif step in ("tell", "lose"):
            for change in log.changes(files, most=1000):
                if step == "tell" and tiers.take_changes("w", tier_changes(change), now):
                    for part in log.snapshot(files):
                        tiers.take_snapshot("w", tier_snapshot_part(part))
        elif step == "connect":
            tiers.disconnected("w")
            assert tiers.check("w", "w-0", report, now)
            for part in log.snapshot(files):
                tiers.take_snapshot("w", tier_snapshot_part(part))
    assert known(tiers, range(number)) == {each for names in files.segments.values() for each in names}


def test_store_announces_its_records_and_no_other_owners(tmp_path: Path) -> None:
    mine, other = store_in(tmp_path, "mine"), store_in(tmp_path, "other")
    mine.put(named_blocks([1, 2]))
    other.put(named_blocks([3]))
    mine.refresh()
    (change,) = FilesLog().changes(mine)
    assert change.stored == [cache_pb2.TierPiece(segment=1, names=name_of(1)[:8] + name_of(2)[:8])]
    mine.close()
    again = store_in(tmp_path, "mine")
    assert list(FilesLog().changes(again)) == [change], "as it is read from the files after a restart"
    again.close()
    other.close()


def test_evicted_segments_are_announced_as_removed(tmp_path: Path) -> None:
    store, log = store_in(tmp_path, blocks=64), FilesLog()
    gone: list[int] = []
    for first in range(0, 200, 10):
        store.put(named_blocks(range(first, first + 10)))
        gone += [number for change in log.changes(store) for number in change.removed_segments]
    assert gone == list(range(1, 1 + len(gone))) and len(gone) > 10
    told = [name for part in log.snapshot(store) for piece in part.stored for name in [piece.names]]
    assert sum(map(len, told)) == NAME_BYTES * sum(store.own_slots().values())
    store.close()
    assert store.own_slots() == {}
