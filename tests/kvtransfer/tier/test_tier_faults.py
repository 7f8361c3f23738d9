"""Files that fail or lie: a block that is torn, cut off, flipped or unreadable is a miss, and never an answer."""

import errno
from pathlib import Path

import pytest

from baton.kvtransfer.tier.records import HEADER_BYTES
from baton.kvtransfer.tier.staging import Staging
from tests.fixtures.faulty_disk import Faults, FaultyDisk
from tests.fixtures.tier_blocks import FORMAT, loaded, name_of, named_blocks, segment_files, store_in

EVERY_REGION = [0, 9, 45, 61, 64, 70, 80, 110, 118, 125, 128, 200, 383]
"""Bytes of a segment: in each field of both headers, and in the first block."""


@pytest.mark.parametrize("place", EVERY_REGION)
@pytest.mark.parametrize("while_open", [False, True], ids=["before it is opened", "while it is open"])
def test_flipped_bit_anywhere_makes_its_block_a_miss(tmp_path: Path, place: int, while_open: bool) -> None:
    store = store_in(tmp_path)
    store.put(named_blocks(range(5)))
    if not while_open:
        store.close()
    [path] = segment_files(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[place] ^= 0x10
    path.write_bytes(raw)
    if not while_open:
        store = store_in(tmp_path)
    found = loaded(store, [0])
    if place >= HEADER_BYTES:
        assert found == 0
        assert loaded(store, [1, 2, 3, 4]) == 4, "its neighbours are as they were"
    elif not while_open:
        assert (found, store.counters.foreign_segments) == (0, 1)
    assert loaded(store, [0]) == found, "it is not given out later either"
    store.close()


def test_corrupt_block_is_counted_once_and_can_be_written_again(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.put(named_blocks(range(5)))
    [path] = segment_files(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[FORMAT.offset(2) + HEADER_BYTES + 17] ^= 1
    path.write_bytes(raw)
    assert loaded(store, range(5)) == 2
    assert loaded(store, range(5)) == 2
    assert store.counters.corrupt_blocks == 1
    store.put(named_blocks([2]))
    assert loaded(store, range(5)) == 5
    store.close()


@pytest.mark.parametrize("cut", range(1, 2 * FORMAT.record_bytes, 37))
def test_file_that_was_cut_off_keeps_its_whole_blocks(tmp_path: Path, cut: int) -> None:
    store = store_in(tmp_path, blocks=6400)
    store.put(named_blocks(range(5)))
    store.close()
    [path] = segment_files(tmp_path)
    path.write_bytes(path.read_bytes()[:-cut])
    store = store_in(tmp_path, blocks=6400)
    whole = 5 - -(-cut // FORMAT.record_bytes)
    assert loaded(store, range(5)) == whole
    store.put(named_blocks(range(5)))
    assert loaded(store, range(5)) == 5
    store.close()


def test_truncated_open_file_is_a_miss(tmp_path: Path) -> None:
    store = store_in(tmp_path, blocks=6400)
    store.put(named_blocks(range(5)))
    [path] = segment_files(tmp_path)
    with path.open("r+b") as file:
        file.truncate(FORMAT.offset(3) + 100)
    assert (loaded(store, range(5)), store.counters.corrupt_blocks) == (3, 1)
    store.close()


def test_bytes_of_an_earlier_read_never_replace_missing_ones(tmp_path: Path) -> None:
    """The staging still holds a block when the file has ended."""
    store = store_in(tmp_path, blocks=6400)
    store.put(named_blocks(range(2)))
    staging = Staging(1, FORMAT.block_bytes)
    assert store.load([name_of(1)], staging) == 1
    assert store.verify([name_of(1)], staging) == 1
    with segment_files(tmp_path)[0].open("r+b") as file:
        file.truncate(FORMAT.offset(1))
    assert store.load([name_of(1)], staging) == 1
    assert store.verify([name_of(1)], staging) == 0
    store.close()


def test_full_disk_fails_the_write_and_keeps_earlier_blocks(tmp_path: Path) -> None:
    disk = FaultyDisk(tmp_path)
    store = store_in(disk, blocks=6400)
    store.put(named_blocks(range(3)))
    disk.faults.left_bytes = FORMAT.record_bytes + 100
    with pytest.raises(OSError, match="No space left"):
        store.put(named_blocks(range(3, 8)))
    assert loaded(store, range(8)) == 3
    disk.faults.left_bytes = None
    store.put(named_blocks(range(3, 8)))
    assert loaded(store, range(8)) == 8
    assert len(segment_files(tmp_path)) == 1, "tries leave no files behind"
    store.close()
    store = store_in(tmp_path, blocks=6400)
    assert (loaded(store, range(8)), store.counters.corrupt_blocks) == (8, 0)
    store.close()


def test_disk_that_was_full_from_the_beginning_leaves_no_file(tmp_path: Path) -> None:
    disk = FaultyDisk(tmp_path, Faults(left_bytes=10))
    store = store_in(disk)
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            store.put(named_blocks([1]))
    assert segment_files(tmp_path) == []
    store.close()


def test_write_that_cannot_be_cut_off_again_is_written_over(tmp_path: Path) -> None:
    disk = FaultyDisk(tmp_path)
    store = store_in(disk, blocks=6400)
    store.put(named_blocks(range(3)))
    disk.faults.left_bytes = 2 * FORMAT.record_bytes + 100
    disk.faults.failing["truncate"] = errno.EIO
    with pytest.raises(OSError, match="truncate"):
        store.put(named_blocks(range(3, 8)))
    disk.faults.left_bytes = None
    store.put(named_blocks([10, 11]))
    assert loaded(store, [0, 1, 2, 10, 11]) == 5
    store.close()
    store = store_in(tmp_path, blocks=6400)
    assert loaded(store, [0, 1, 2, 10, 11]) == 5
    assert loaded(store, [3]) == 0
    store.close()


def test_block_that_cannot_be_read_fails_once_and_is_a_miss_from_then_on(tmp_path: Path) -> None:
    disk = FaultyDisk(tmp_path)
    store = store_in(disk)
    store.put(named_blocks(range(3)))
    disk.faults.failing["read"] = errno.EIO
    with pytest.raises(OSError, match="read"):
        loaded(store, [1])
    del disk.faults.failing["read"]
    assert loaded(store, [1]) == 0
    assert (loaded(store, [0]), loaded(store, [2])) == (1, 1)
    store.close()


@pytest.mark.parametrize("call", ["claim", "segments", "open", "read", "owners"])
def test_opening_that_fails_leaves_the_folder_to_the_next_try(tmp_path: Path, call: str) -> None:
    store = store_in(tmp_path)
    store.put(named_blocks(range(3)))
    store.close()
    disk = FaultyDisk(tmp_path, Faults(failing={call: errno.EIO}))
    with pytest.raises(OSError, match=call):
        store_in(disk)
    disk.faults.failing.clear()
    store = store_in(disk)
    assert loaded(store, range(3)) == 3
    store.close()


def test_segment_that_cannot_be_read_any_more_is_evicted_all_the_same(tmp_path: Path) -> None:
    disk = FaultyDisk(tmp_path)
    store = store_in(disk, blocks=128)
    store.put(named_blocks(range(100)))
    disk.faults.failing["read"] = errno.EIO
    for begin in range(100, 300, 10):
        store.put(named_blocks(range(begin, begin + 10)))
    del disk.faults.failing["read"]
    assert loaded(store, range(280, 300)) == 20
    store.close()


def test_directory_that_was_removed_is_made_again(tmp_path: Path) -> None:
    store = store_in(tmp_path, blocks=64)
    store.put(named_blocks(range(3)))
    for path in (tmp_path / "worker-0").iterdir():
        path.unlink()
    (tmp_path / "worker-0").rmdir()
    store.put(named_blocks(range(3, 8)))
    assert loaded(store, range(3, 8)) == 5
    store.close()


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    store_in(tmp_path).close()
    (tmp_path / "worker-0" / "notes.txt").write_text("mine")
    (tmp_path / "worker-0" / "000000000003.kv").write_bytes(b"no segment at all" * 10)
    (tmp_path / "worker-0" / "000000000004.kv").write_bytes(b"")
    store = store_in(tmp_path)
    assert (len(store), store.counters.foreign_segments) == (0, 1)
    store.put(named_blocks(range(3)))
    assert loaded(store, range(3)) == 3
    assert (tmp_path / "worker-0" / "notes.txt").read_text() == "mine"
    store.close()


@pytest.mark.parametrize("content", [b"", b"no segment at all" * 10], ids=["empty", "no segment"])
def test_file_that_somebody_put_where_the_next_segment_belongs_is_passed_over(tmp_path: Path, content: bytes) -> None:
    store = store_in(tmp_path, blocks=640)
    store.put(named_blocks(range(3)))
    (tmp_path / "worker-0" / "000000000002.kv").write_bytes(content)
    store.put(named_blocks(range(3, 40)))
    assert loaded(store, range(40)) == 40
    assert (tmp_path / "worker-0" / "000000000002.kv").read_bytes() == content
    store.close()
