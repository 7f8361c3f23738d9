"""What a router knows of workers' files: by directory, while anybody is there who reads it, and in bounded memory."""

import random
import tracemalloc
from dataclasses import replace

from baton.router.cache.follower import ASK_AGAIN_S, BEHIND_S
from baton.router.cache.tiers import KnownFiles, TierChanges, TierDirectories, TierPiece, TierSnapshotPart
from tests.fixtures.tier_blocks import name_of
from tests.fixtures.tier_reports import tier_report

ONE, TWO = b"1" * 16, b"2" * 16
PROMPT = [name_of(number) for number in range(20)]


def piece(numbers: range, segment: int = 1, first_slot: int = 0) -> TierPiece:
    return TierPiece(segment, first_slot, b"".join(PROMPT[number][:8] for number in numbers))


def follow(tiers: TierDirectories, worker: str, directory: bytes, *pieces: TierPiece, now: float = 0.0) -> None:
    """Its folder has the worker's name."""
    assert tiers.check(worker, worker, tier_report(directory), now), "asks for a snapshot"
    tiers.take_snapshot(worker, TierSnapshotPart(0, 0, 1, pieces))


def behind(tiers: TierDirectories, **hit_blocks: int) -> dict[str, int]:
    return tiers.behind(PROMPT, hit_blocks)


def test_block_of_one_worker_can_be_loaded_by_its_directory_alone() -> None:
    tiers = TierDirectories()
    follow(tiers, "a", ONE, piece(range(5)))
    follow(tiers, "b", ONE)
    follow(tiers, "c", TWO)
    assert behind(tiers, a=0, b=0, c=0, unknown=0) == {"a": 5, "b": 5}


def test_file_blocks_count_after_pool_blocks_up_to_the_first_missing_one() -> None:
    tiers = TierDirectories()
    follow(tiers, "a", ONE, piece(range(2, 6)), piece(range(8, 20), 2))
    follow(tiers, "b", ONE)
    follow(tiers, "c", ONE)
    assert behind(tiers, a=0, b=2, c=5) == {"b": 4, "c": 1}
    assert behind(tiers, a=6, b=9, c=20) == {"b": 11}, "what is in the pool too counts once"


def test_files_of_a_dead_worker_stay_known_while_another_reads_them() -> None:
    tiers = TierDirectories()
    follow(tiers, "a", ONE, piece(range(5)))
    follow(tiers, "b", ONE, piece(range(5, 9)))
    tiers.forget("a")
    assert behind(tiers, a=0, b=0) == {"b": 9}
    tiers.forget("b")
    assert not tiers.directories and len(tiers) == 0
    follow(tiers, "b", ONE)
    assert behind(tiers, b=0) == {}, "nobody was there who could say what became of them"


def test_returning_worker_announces_its_folder_again() -> None:
    tiers = TierDirectories()
    follow(tiers, "a", ONE, piece(range(5)))
    follow(tiers, "b", ONE)
    tiers.forget("a")
    follow(tiers, "a", ONE, piece(range(3)))
    assert behind(tiers, a=0, b=0) == {"a": 3, "b": 3}


def test_block_in_two_folders_is_there_until_both_have_lost_it() -> None:
    tiers = TierDirectories()
    follow(tiers, "a", ONE, piece(range(3)))
    follow(tiers, "b", ONE, piece(range(3)))
    assert len(tiers) == 3
    tiers.take_changes("a", TierChanges(1, (), (1,)), 0.0)
    assert behind(tiers, a=0) == {"a": 3}
    tiers.take_changes("b", TierChanges(1, (), (1,)), 0.0)
    assert behind(tiers, a=0) == {}


def test_closed_or_moved_tier_is_forgotten() -> None:
    tiers = TierDirectories()
    follow(tiers, "a", ONE, piece(range(5)))
    assert not tiers.check("a", "a", tier_report(b""), 1.0)
    assert behind(tiers, a=0) == {} and tiers.known("a") is None
    follow(tiers, "a", ONE, piece(range(5)), now=2.0)
    follow(tiers, "a", TWO, piece(range(2)), now=3.0)
    assert behind(tiers, a=0) == {"a": 2}
    assert not tiers.check("a", "a", None, 4.0), "an older worker says nothing of files"
    assert not tiers.directories


def test_missing_message_requests_a_snapshot_at_most_once_a_second() -> None:
    tiers = TierDirectories()
    follow(tiers, "a", ONE, piece(range(2)))
    assert tiers.take_changes("a", TierChanges(2, (piece(range(4, 6), 1, 4),)), 5.0)
    assert not tiers.take_changes("a", TierChanges(3), 5.1), "nothing is followed until the snapshot comes"
    assert not tiers.check("a", "a", tier_report(ONE), 5.0 + ASK_AGAIN_S)
    assert tiers.check("a", "a", tier_report(ONE), 5.1 + ASK_AGAIN_S)
    tiers.take_snapshot("a", TierSnapshotPart(3, 0, 2, (piece(range(4)),)))
    assert not tiers.take_changes("a", TierChanges(4), 8.0), "the snapshot has not come to its end"
    tiers.take_snapshot("a", TierSnapshotPart(3, 1, 2, (piece(range(4, 6), 1, 4),)))
    assert behind(tiers, a=0) == {"a": 6}
    assert tiers.known("a") == KnownFiles(6, 6, follows=True, directory_id=ONE)


def test_snapshot_that_misses_a_part_is_asked_for_again() -> None:
    tiers = TierDirectories()
    follow(tiers, "a", ONE, piece(range(2)))
    tiers.disconnected("a")
    assert tiers.check("a", "a", tier_report(ONE), 5.0)
    tiers.take_snapshot("a", TierSnapshotPart(0, 0, 3, (piece(range(4)),)))
    tiers.take_snapshot("a", TierSnapshotPart(0, 2, 3, (piece(range(4, 6), 2),)))
    known = tiers.known("a")
    assert known is not None and not known.follows
    assert tiers.check("a", "a", tier_report(ONE), 5.1 + ASK_AGAIN_S)
    tiers.take_snapshot("a", TierSnapshotPart(0, 0, 1, (piece(range(3)),)))
    assert behind(tiers, a=0) == {"a": 3}


def test_piece_that_does_not_follow_on_its_segment_is_a_missing_one_too() -> None:
    tiers = TierDirectories()
    follow(tiers, "a", ONE, piece(range(2)))
    assert tiers.take_changes("a", TierChanges(1, (piece(range(4, 6), 1, 4),)), 5.0)


def test_messages_counted_by_a_report_and_never_received_are_noticed() -> None:
    tiers = TierDirectories()
    follow(tiers, "a", ONE, piece(range(2)))
    ahead = replace(tier_report(ONE), sequence=1)
    assert not tiers.check("a", "a", ahead, 5.0)
    assert not tiers.check("a", "a", ahead, 5.0 + BEHIND_S)
    assert tiers.check("a", "a", ahead, 5.1 + BEHIND_S)


def test_old_messages_and_those_of_unknown_workers_change_nothing() -> None:
    tiers = TierDirectories()
    follow(tiers, "a", ONE, piece(range(2)))
    assert not tiers.take_changes("a", TierChanges(0, (), (1,)), 1.0)
    assert not tiers.take_changes("z", TierChanges(1, (), (1,)), 1.0)
    tiers.take_snapshot("z", TierSnapshotPart(1, 0, 1, ()))
    tiers.take_changes("a", TierChanges(1, (piece(range(2, 3), 1, 2),)), 1.0)
    tiers.take_snapshot("a", TierSnapshotPart(0, 0, 1, ()))
    assert behind(tiers, a=0) == {"a": 3}


def test_damaged_records_have_a_place_and_no_name() -> None:
    tiers = TierDirectories()
    names = PROMPT[0][:8] + bytes(8) + PROMPT[1][:8]
    follow(tiers, "a", ONE, TierPiece(1, 0, names))
    assert (len(tiers), behind(tiers, a=0)) == (2, {"a": 2})
    assert not tiers.take_changes("a", TierChanges(1, (piece(range(2, 3), 1, 3),)), 1.0)


def test_memory_is_bounded_and_reused() -> None:
    tiers = TierDirectories(most_blocks=4)
    follow(tiers, "a", ONE, piece(range(3)), piece(range(3, 9), 2))
    follow(tiers, "b", TWO, piece(range(9)))
    assert len(tiers) == 4 and behind(tiers, a=0, b=0) == {"a": 4}
    assert not tiers.take_changes("a", TierChanges(1, (piece(range(9, 10), 2, 6),), (1,)), 1.0)
    assert tiers.known("a") == KnownFiles(2, 2, follows=True, directory_id=ONE), (
        "of three that left, one was given to a new block"
    )
    tiers.forget("a")
    tiers.forget("b")
    follow(tiers, "b", ONE, piece(range(9)))
    assert len(tiers) == 4


def test_block_takes_no_more_memory_than_is_stated() -> None:
    chance, tiers, blocks = random.Random(1), TierDirectories(), 100_000
    tiers.check("a", "a", tier_report(ONE), 0.0)
    names = [chance.randbytes(8 * 8192) for _ in range(blocks // 8192)]
    tracemalloc.start()
    pieces = tuple(TierPiece(number, 0, each) for number, each in enumerate(names))
    tiers.take_snapshot("a", TierSnapshotPart(0, 0, 1, pieces))
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used / len(tiers) < 130
