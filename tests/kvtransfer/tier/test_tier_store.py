"""Blocks in files: found again, by their owner after a restart and by others beside it, within a bound of bytes."""

import os
import stat
from pathlib import Path

import pytest

from baton.kvtransfer.tier.files import OwnerBusy, RealDisk
from baton.kvtransfer.tier.records import SegmentFormat
from baton.kvtransfer.tier.store import TierStore, least_bytes
from tests.fixtures.tier_blocks import FORMAT, loaded, name_of, named_blocks, segment_files, store_in


def folder_bytes(directory: Path, owner: str = "worker-0") -> int:
    return sum(path.stat().st_size for path in segment_files(directory, owner))


def test_stored_blocks_equal_what_was_put(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.put(named_blocks(range(30)))
    assert loaded(store, range(30)) == 30
    assert store.known([name_of(number) for number in range(40)]) == 30
    assert (store.counters.stored_bytes, store.counters.loaded_blocks) == (30 * FORMAT.record_bytes, 30)
    store.close()


def test_more_blocks_than_staging_are_written_in_turns(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.put(named_blocks(range(30)))
    assert loaded(store, range(30), slots=7) == 7
    store.close()


def test_known_block_is_not_rewritten(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.put(named_blocks([1, 2, 1]))
    before = folder_bytes(tmp_path)
    store.put(named_blocks([2, 1]))
    assert (folder_bytes(tmp_path), len(store)) == (before, 2)
    store.close()


def test_new_process_finds_all_and_writes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    first = store_in(tmp_path)
    first.put(named_blocks(range(25)))
    files = len(segment_files(tmp_path))
    first.close()
    second = store_in(tmp_path)
    assert loaded(second, range(25)) == 25
    second.put(named_blocks([25]))
    assert len(segment_files(tmp_path)) <= files + 1
    assert loaded(second, range(26)) == 26
    second.close()


def test_restart_makes_no_new_file_while_the_newest_has_room(tmp_path: Path) -> None:
    for number in range(5):
        store = store_in(tmp_path, blocks=6400)
        store.put(named_blocks([number]))
        store.close()
    assert len(segment_files(tmp_path)) == 1


def test_after_close_nothing_is_found(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.put(named_blocks(range(3)))
    store.close()
    assert (store.known([name_of(0)]), loaded(store, [0]), store.is_open) == (0, 0, False)


def test_only_their_user_can_read_files_and_folders(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        store = store_in(tmp_path / "tier")
        store.put(named_blocks(range(3)))
        store.close()
    finally:
        os.umask(previous)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "tier").rglob("*")}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
    assert stat.S_IMODE((tmp_path / "tier").stat().st_mode) == 0o700


def test_owners_readable_folder_is_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / "worker-0").mkdir(mode=0o755)
    store_in(tmp_path).close()
    assert stat.S_IMODE((tmp_path / "worker-0").stat().st_mode) == 0o700


def test_second_process_of_the_same_name_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    first = store_in(tmp_path)
    with pytest.raises(OwnerBusy, match="another live process"):
        store_in(tmp_path)
    first.close()
    store_in(tmp_path).close()


def test_workers_find_each_others_blocks_even_later_ones(tmp_path: Path) -> None:
    writer, reader = store_in(tmp_path, "prefill-0"), store_in(tmp_path, "decode-0")
    writer.put(named_blocks(range(3)))
    assert loaded(reader, range(3)) == 0
    reader.refresh()
    assert loaded(reader, range(3)) == 3
    writer.put(named_blocks(range(3, 40)))
    reader.refresh()
    assert loaded(reader, range(40)) == 40
    reader.put(named_blocks(range(40)))  # nothing is written twice
    assert segment_files(tmp_path, "decode-0") == []
    writer.close()
    reader.close()


def test_blocks_of_an_exited_worker_are_still_found(tmp_path: Path) -> None:
    gone = store_in(tmp_path, "prefill-1")
    gone.put(named_blocks(range(5)))
    gone.close()
    other = store_in(tmp_path, "prefill-0")
    assert loaded(other, range(5)) == 5
    other.close()


def test_folders_that_no_worker_made_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir(mode=0o755)
    (tmp_path / "photos" / "000000000001.kv").write_bytes(b"mine")
    store = store_in(tmp_path)
    assert (RealDisk(tmp_path).owners(), store.counters.foreign_segments) == (["worker-0"], 0)
    store.close()


def test_blocks_removed_by_another_worker_are_forgotten(tmp_path: Path) -> None:
    writer, reader = store_in(tmp_path, "prefill-0"), store_in(tmp_path, "decode-0")
    writer.put(named_blocks(range(5)))
    reader.refresh()
    for path in segment_files(tmp_path, "prefill-0"):
        path.unlink()
    assert loaded(reader, range(5)) == 5, "an open file stays readable"
    reader.refresh()
    assert loaded(reader, range(5)) == 0
    writer.close()
    reader.close()


def test_segment_of_another_model_is_counted_and_never_read(tmp_path: Path) -> None:
    foreign = SegmentFormat(b"j" * 32, FORMAT.block_bytes)
    other = store_in(tmp_path, format=foreign)
    other.put(named_blocks(range(5), foreign))
    other.close()
    store = store_in(tmp_path)
    assert (loaded(store, range(5)), store.counters.foreign_segments, len(store)) == (0, 1, 0)
    store.put(named_blocks(range(5)))
    assert loaded(store, range(5)) == 5
    store.close()


def test_record_that_was_moved_into_anothers_segment_is_none(tmp_path: Path) -> None:
    foreign = SegmentFormat(b"j" * 32, FORMAT.block_bytes)
    other = store_in(tmp_path / "a", format=foreign)
    other.put(named_blocks(range(2), foreign))
    other.close()
    store = store_in(tmp_path / "b")
    store.put(named_blocks(range(2)))
    store.close()
    [ours], [theirs] = segment_files(tmp_path / "b"), segment_files(tmp_path / "a")
    ours.write_bytes(ours.read_bytes()[:64] + theirs.read_bytes()[64:])
    store = store_in(tmp_path / "b")
    assert loaded(store, range(2)) == 0
    store.close()


def test_segments_of_another_model_in_the_own_folder_are_evicted_first(tmp_path: Path) -> None:
    foreign = SegmentFormat(b"j" * 32, FORMAT.block_bytes)
    other = store_in(tmp_path, blocks=128, format=foreign)
    other.put(named_blocks(range(100), foreign))
    other.close()
    store = store_in(tmp_path, blocks=128)
    store.put(named_blocks(range(90)))
    assert loaded(store, range(90), slots=90) == 90
    store.close()


@pytest.mark.parametrize("blocks", [8, 9, 64, 200, 1000])
def test_folder_never_outgrows_its_bound_and_keeps_the_newest(tmp_path: Path, blocks: int) -> None:
    store = store_in(tmp_path, blocks=blocks)
    bound = blocks * (FORMAT.record_bytes + 64)
    for begin in range(0, 3 * blocks, 5):
        store.put(named_blocks(range(begin, begin + 5)))
        assert folder_bytes(tmp_path) <= bound
        assert folder_bytes(tmp_path) == store.own_bytes
    newest = range(begin + 5 - max(2, blocks // 2), begin + 5)
    assert loaded(store, newest, slots=blocks) == len(newest)
    assert store.counters.evicted_blocks > 0
    store.close()


def test_oldest_blocks_go_first(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.put(named_blocks(range(900)))
    assert store.known([name_of(0)]) == 0
    assert loaded(store, range(300, 900), slots=600) == 600
    store.close()


def test_bound_that_holds_next_to_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="the size of 8 blocks"):
        TierStore(RealDisk(Path("/nonexistent")), "a", FORMAT, least_bytes(FORMAT) - 1)


def test_readahead_of_missing_blocks_is_harmless(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.put(named_blocks(range(30)))
    store.announce([name_of(number) for number in range(40)])
    assert loaded(store, range(30)) == 30
    store.close()
