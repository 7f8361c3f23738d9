"""Files are really damaged, the proof of it is right, and the store returns no damaged block."""

import asyncio
import errno
import random
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from baton.lab.chaos import injection
from baton.lab.chaos.disk import damage
from baton.lab.chaos.disk import injections as under_test
from baton.lab.chaos.disk.counts import TierCounts
from baton.lab.chaos.disk.injections import DISK_FAULTS, DiskFails, FilesDamaged, FolderTaken, KilledWriting, TierScene
from baton.lab.chaos.faults import Fault, FaultKind
from baton.lab.chaos.injection import NotMade, NotProven
from baton.lab.chaos.watch import Life
from tests.fixtures.loop_clock import put_forward
from tests.fixtures.tier_blocks import FORMAT, loaded, named_blocks, segment_files, store_in

NOBODY = Life(2**22 + 1, 0)  # higher than any PID
BLOCKS = 120


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "MADE_S", 0.2)
    monkeypatch.setattr(injection, "PROOF_S", 0.2)


@dataclass
class Processes:
    sent: list[signal.Signals] = field(default_factory=list)

    def life(self, name: str) -> Life | None:
        return NOBODY

    def send(self, life: Life, number: signal.Signals) -> None:
        self.sent.append(number)


@dataclass
class Page:
    """Page of disk faults that a worker has met, or not."""

    met: bool
    values: dict[str, int] = field(default_factory=dict)

    def set(self, name: str, value: int) -> None:
        self.values[name] = value
        if self.met and value:
            for count in ("failed_reads", "failed_writes", "slow_reads", "cut_writes", "torn_bytes"):
                self.values[count] = self.values.get(count, 0) + 1

    def get(self, name: str) -> int:
        return self.values.get(name, 0)


def files_of(directory: Path) -> list[Path]:
    store = store_in(directory)
    store.put(named_blocks(range(BLOCKS)))
    store.close()
    return segment_files(directory)


@pytest.mark.parametrize("change", [damage.flip_bits, damage.cut_off, damage.add_garbage])
def test_damaged_files_give_out_no_wrong_block(tmp_path: Path, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(damage, "EVERY_BYTES", 700)
    before = [path.read_bytes() for path in files_of(tmp_path)]
    done = change(segment_files(tmp_path), random.Random(3))
    assert done.files == len(before) and done.places > 0
    assert before != [path.read_bytes() for path in segment_files(tmp_path)]
    store = store_in(tmp_path)
    right = sum(loaded(store, [number]) for number in range(BLOCKS))  # also checks their content
    assert 0 < right < BLOCKS or change is damage.add_garbage
    store.close()


def test_another_models_files_have_our_names_and_are_never_read(tmp_path: Path) -> None:
    files_of(tmp_path)
    done = damage.add_other_model(tmp_path, random.Random(3))
    assert done.files == 8 and done.places > 0
    assert (tmp_path / damage.STRANGER).is_dir()
    raw = (tmp_path / damage.STRANGER / "000000000001.kv").read_bytes()
    theirs = type(FORMAT)(damage.OTHER_MODEL, FORMAT.block_bytes)
    assert theirs.read_record_header(raw[64:128]) is not None, "it is a good segment of the other model"
    store = store_in(tmp_path)
    assert sum(loaded(store, [number]) for number in range(BLOCKS)) == BLOCKS
    assert store.counters.foreign_segments == 8
    store.put(named_blocks(range(BLOCKS, BLOCKS + 30)))
    assert loaded(store, range(BLOCKS, BLOCKS + 30)) == 30, "its owner writes on, past the numbers of the others"
    store.close()


async def test_unused_disk_has_not_failed() -> None:
    fails = DiskFails(Page(met=False), TierCounts(), DISK_FAULTS[FaultKind.SHORT_WRITES], 0.0)  # type: ignore[arg-type]
    await fails.inject()
    with pytest.raises(NotMade):
        await fails.prove()


async def test_disk_that_fails_must_be_noticed_by_a_worker_and_is_well_afterwards() -> None:
    page, counts = Page(met=True), TierCounts()
    fails = DiskFails(page, counts, DISK_FAULTS[FaultKind.DISK_FULL], 0.0)  # type: ignore[arg-type]
    await fails.inject()
    assert page.get("write_error") == errno.ENOSPC
    with pytest.raises(NotProven, match="writes are off"):
        await fails.prove()
    counts.take({"decode-0": {"reads": 1.0, "writes": 0.0}})
    assert "writes of 1 workers went off" in await fails.prove()
    await fails.heal()
    assert page.get("write_error") == 0


async def test_disk_fault_waits_for_a_worker_that_notices_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine, a worker may turn off its reads half a minute later."""
    monkeypatch.undo()
    counts = TierCounts()
    fails = DiskFails(Page(met=True), counts, DISK_FAULTS[FaultKind.READ_ERROR], 0.0)  # type: ignore[arg-type]
    await fails.inject()
    proving = asyncio.create_task(fails.prove())
    await asyncio.sleep(0)
    put_forward(60.0)
    await asyncio.sleep(2 * injection.POLL_S)
    assert not proving.done()
    counts.take({"decode-0": {"reads": 0.0, "writes": 1.0}})
    assert "reads of 1 workers went off" in await proving


async def test_kill_within_a_write_is_none_without_a_write() -> None:
    processes, page = Processes(), Page(met=False)
    kill = KilledWriting(processes, page, NOBODY)  # type: ignore[arg-type]
    with pytest.raises(NotMade):
        await kill.inject()
    assert (processes.sent, page.get("torn_pid")) == ([], 0)


async def test_kill_within_a_write_is_proved_by_both() -> None:
    processes = Processes()
    kill = KilledWriting(processes, Page(met=True), NOBODY)  # type: ignore[arg-type]
    await kill.inject()
    assert "bytes into a write" in await kill.prove()
    assert processes.sent == [signal.SIGKILL]


async def test_unfound_bit_flips_are_not_proven(tmp_path: Path) -> None:
    files_of(tmp_path)
    scene = TierScene(tmp_path, None, TierCounts())
    flip = FilesDamaged(Processes(), scene, Fault(FaultKind.FILE_FLIP, "disk"), None, random.Random(1))
    await flip.inject()
    with pytest.raises(NotProven, match="a damaged block"):
        await flip.prove()
    scene.counts.take({"decode-0": {"reads": 1.0, "writes": 1.0, "corrupt_blocks": 2.0}})
    assert "2 damaged blocks found" in await flip.prove()


async def test_files_of_a_worker_are_damaged_while_it_is_down(tmp_path: Path) -> None:
    files_of(tmp_path)
    processes, scene = Processes(), TierScene(tmp_path, None, TierCounts())
    cut = FilesDamaged(processes, scene, Fault(FaultKind.FILE_CUT, "worker-0"), NOBODY, random.Random(1))
    await cut.inject()
    assert processes.sent == [signal.SIGKILL]
    assert "bytes cut off" in await cut.prove()
    none = FilesDamaged(processes, scene, Fault(FaultKind.FILE_CUT, "worker-9"), NOBODY, random.Random(1))
    with pytest.raises(NotMade, match="no KV in files"):
        await none.inject()


async def test_folder_is_taken_until_returned(tmp_path: Path) -> None:
    files_of(tmp_path)
    scene = TierScene(tmp_path, None, TierCounts())
    taken = FolderTaken(Processes(), scene, "worker-0", NOBODY, 0.0)
    await taken.inject()
    with pytest.raises(OSError, match="another live process"):
        store_in(tmp_path)
    for values in ({}, {"hits": 3.0}, {"reads": 0.0, "writes": 1.0}):
        scene.counts.take({"worker-0": values})
        with pytest.raises(NotProven, match="without files"):
            await taken.prove()
    scene.counts.take({"worker-0": {"reads": 0.0, "writes": 0.0}})
    assert "without files" in await taken.prove()
    await taken.heal()
    store_in(tmp_path).close()


async def test_folder_kept_by_its_owner_was_not_taken(tmp_path: Path) -> None:
    owner = store_in(tmp_path)
    taken = FolderTaken(Processes(), TierScene(tmp_path, None, TierCounts()), "worker-0", NOBODY, 0.0)
    with pytest.raises(NotProven, match="worker-0, which was killed, free"):
        await taken.inject()
    successor = FolderTaken(
        Processes(), TierScene(tmp_path, None, TierCounts()), "worker-0", replace(NOBODY, pid=1), 0.0
    )
    with pytest.raises(NotMade, match="the restarted worker locked its folder first"):
        await successor.inject()
    owner.close()
