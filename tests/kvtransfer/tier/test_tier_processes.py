"""Real processes on a real file system, whose calls fail below Python: no wrong block, and none of them ends."""

import errno
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.lab.chaos.disk.shim import DiskShim, make_disk_shim
from tests.fixtures.tier_blocks import FORMAT, loaded, segment_files, store_in
from tests.fixtures.tier_process import BLOCKS, TierProcesses
from tests.fixtures.waiting import wait_until

OWNER = 65534  # nobody
KILLS = 6
FAULTS = ("read_error", "write_error", "cuts_writes", "torn_pid", "torn_bytes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On the disk that fails."""
    return tmp_path_factory.mktemp("disk")


@pytest.fixture
def directory(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=folder))


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[DiskShim]:
    made = make_disk_shim(tmp_path_factory.mktemp("shim"), folder)
    assert made is not None, "no C compiler"
    yield made
    made.close()


@pytest.fixture
def shim(disk: DiskShim) -> Iterator[DiskShim]:
    """Of which nothing fails after the test."""
    yield disk
    for field in FAULTS:
        disk.set(field, 0)


@pytest.fixture(scope="module")
def processes(disk: DiskShim) -> Iterator[TierProcesses]:
    made = TierProcesses(disk.environment)
    yield made
    made.close()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_write_that_fails_loses_its_blocks_and_no_others(
    processes: TierProcesses, shim: DiskShim, directory: Path, error: int
) -> None:
    with processes.start(directory) as owner:
        assert owner.ask("open") == "done 0"
        assert owner.ask("put 0 20") == "done 0"
        shim.set("write_error", error)
        for _ in range(3):
            assert owner.ask("put 20 40") == f"failed {os.strerror(error)}"
        assert owner.ask("load 0 40") == "done 20"
        shim.set("write_error", 0)
        assert owner.ask("put 20 40") == "done 0"
        assert owner.ask("load 0 40") == "done 40"
    store = store_in(directory, blocks=BLOCKS)
    assert (loaded(store, range(40)), store.counters.corrupt_blocks) == (40, 0)
    store.close()


def test_partial_write_of_a_full_disk_is_cut_off_and_repeated(
    processes: TierProcesses, shim: DiskShim, directory: Path
) -> None:
    """The first call takes half, the next fails: what was written of it is cut off again."""
    with processes.start(directory) as owner:
        assert owner.ask("open") == "done 0"
        assert owner.ask("put 0 5") == "done 0"
        size = segment_files(directory)[0].stat().st_size
        shim.set("cuts_writes", 1)
        shim.set("write_error", 0)
        before = shim.get("cut_writes")
        assert owner.ask("put 5 10") == "done 0"
        assert shim.get("cut_writes") > before + 1, "it took several calls"
        assert owner.ask("load 0 10") == "done 10"
        assert segment_files(directory)[0].stat().st_size == size + 5 * FORMAT.record_bytes


def test_failed_read_is_a_miss_and_the_process_continues(
    processes: TierProcesses, shim: DiskShim, directory: Path
) -> None:
    with processes.start(directory) as owner:
        assert owner.ask("open") == "done 0"
        assert owner.ask("put 0 20") == "done 0"
        shim.set("read_error", errno.EIO)
        assert owner.ask("load 0 20") == f"failed {os.strerror(errno.EIO)}"
        shim.set("read_error", 0)
        assert owner.ask("load 0 20") == "done 0", "such blocks are not tried again and again"
        assert owner.ask("put 0 20") == "done 0"
        assert owner.ask("load 0 20") == "done 20"


def test_repeated_kill_9_in_writes_keeps_every_complete_block_and_no_other(
    processes: TierProcesses, shim: DiskShim, directory: Path
) -> None:
    written, draw = 0, random.Random(5)
    for _ in range(KILLS):
        with processes.start(directory) as owner:
            assert owner.ask("open") == "done 0"
            assert owner.ask(f"load 0 {written}") == f"done {min(written, 64)}"
            for _ in range(draw.randrange(3)):
                assert owner.ask(f"put {written} {written + 7}") == "done 0"
                written += 7
            shim.set("torn_bytes", 0)
            shim.set("torn_pid", owner.pid)
            owner.begin(f"put {written} {written + draw.randrange(1, 9)}")
            wait_until(lambda: shim.get("torn_bytes") > 0, "it writes")
            owner.kill()
            shim.set("torn_pid", 0)
    store = store_in(directory, blocks=BLOCKS)
    assert sum(loaded(store, [number]) for number in range(written)) == written
    assert store.counters.corrupt_blocks == 0
    assert len(store) >= written
    store.close()


def test_two_processes_of_one_name_share_a_directory_one_after_the_other(
    processes: TierProcesses, directory: Path
) -> None:
    with processes.start(directory) as first, processes.start(directory) as second:
        assert first.ask("open") == "done 0"
        assert "another live process" in second.ask("open")
        assert first.ask("put 0 30") == "done 0"
        first.kill()
        assert second.ask("open") == "done 0"
        assert second.ask("load 0 30") == "done 30"
        assert second.ask("put 30 60") == "done 0"


def test_two_named_processes_read_each_others_writes(processes: TierProcesses, directory: Path) -> None:
    with processes.start(directory, "worker-0") as first, processes.start(directory, "worker-1") as second:
        assert (first.ask("open"), second.ask("open")) == ("done 0", "done 0")
        for begin in range(0, 120, 20):
            assert first.ask(f"put {begin} {begin + 20}") == "done 0"
            assert second.ask("refresh") == "done 0"
            assert second.ask(f"load {begin} {begin + 20}") == "done 20"
            assert second.ask(f"put {begin} {begin + 20}") == "done 0"
    assert segment_files(directory, "worker-1") == [], "what one has written the other does not write again"


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that another user can reach."""
    made = Path(tempfile.mkdtemp(prefix="baton-read-only-"))
    made.chmod(0o755)
    yield made
    made.chmod(0o755)
    shutil.rmtree(made)


def test_unwritable_directory_is_rejected_at_each_attempt(processes: TierProcesses, shared: Path) -> None:
    with processes.start(shared / "kv") as owner:
        if os.geteuid() == 0:
            assert owner.ask(f"become {OWNER}") == "done 0"
        else:
            shared.chmod(0o555)
        for _ in range(2):
            assert owner.ask("open") == f"failed {os.strerror(errno.EACCES)}"
        assert not (shared / "kv").exists()
        shared.chmod(0o777)
        assert owner.ask("open") == "done 0", "as soon as it may be"
        assert owner.ask("put 0 5") == "done 0"


def test_directory_removed_in_use_is_survived(processes: TierProcesses, directory: Path) -> None:
    with processes.start(directory, "worker-0") as first, processes.start(directory, "worker-1") as second:
        for owner, blocks in ((first, "0 20"), (second, "20 40")):
            assert owner.ask("open") == "done 0"
            assert owner.ask(f"put {blocks}") == "done 0"
        assert first.ask("refresh") == "done 0"
        shutil.rmtree(directory)
        assert first.ask("load 0 20") == "done 20", "what is open stays readable"
        assert first.ask("refresh").startswith(("done", "failed No such file"))
        for begin in range(100, 400, 20):  # until a new segment has to be created
            assert first.ask(f"put {begin} {begin + 20}") == "done 0"
        assert first.ask("load 380 400") == "done 20"
        assert directory.is_dir()
        assert first.ask("refresh") == "done 0"
