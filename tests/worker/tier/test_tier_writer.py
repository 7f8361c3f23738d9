"""What the pool publishes is written behind the engine: whole, within bounds, and never as something that it is not."""

import asyncio
import errno
import hashlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from baton.engine.kv_cache.block_pool import Watch
from baton.engine.runner.thread import EngineStopped
from baton.kvtransfer.slices import PoolShape
from baton.kvtransfer.tier.files import RealDisk
from baton.kvtransfer.tier.staging import BlockCopier, Staging
from baton.kvtransfer.tier.store import TierStore
from baton.worker.tier.writer import IGNORE_SUMS, Blocks, SumListener, TierWriter
from tests.fixtures.faulty_disk import FaultyDisk
from tests.fixtures.session_client import eventually
from tests.fixtures.tier_blocks import FORMAT, bytes_of, loaded, name_of, named_blocks, store_in
from tests.fixtures.tier_stack import FORMAT as STACK_FORMAT
from tests.fixtures.tier_stack import tier_stack
from tests.fixtures.waiting import wait_until

BLOCKS = 64


@dataclass
class FakeEngine:
    """Block n has the name and the bytes of number n, and its watches break as the test says."""

    memory: torch.Tensor = field(default_factory=lambda: torch.empty(BLOCKS * FORMAT.block_bytes, dtype=torch.uint8))
    gone: set[int] = field(default_factory=set)
    broken: set[int] = field(default_factory=set)
    watched: int = 0
    answers: bool = True
    stopped: bool = False

    def __post_init__(self) -> None:
        for number in range(BLOCKS):
            data = torch.frombuffer(bytearray(bytes_of(number)), dtype=torch.uint8)
            self.memory.view(BLOCKS, -1)[number] = data
        self.numbers = {name_of(number): number for number in range(BLOCKS)}

    def watch(self, names: Sequence[bytes]) -> "Future[list[Watch]]":
        if self.stopped:
            raise EngineStopped("it has stopped")
        answer: Future[list[Watch]] = Future()
        numbers = [self.numbers[name] for name in names]
        watches = [Watch(() if each in self.gone else (each,), broken=each in self.broken) for each in numbers]
        self.watched += sum(bool(each.blocks) for each in watches)
        if self.answers:
            answer.set_result(watches)
        return answer

    def unwatch(self, watch: Watch) -> None:
        self.watched -= 1

    @property
    def blocks(self) -> Blocks:
        return Blocks(self.watch, self.unwatch)

    @property
    def pool(self) -> BlockCopier:
        return BlockCopier(self.memory, PoolShape(BLOCKS, FORMAT.block_bytes))


def names(numbers: Sequence[int]) -> list[bytes]:
    return [name_of(number) for number in numbers]


class Writing:
    """A writer over a fake engine; what it left is looked at when it has ended."""

    def __init__(
        self,
        directory: Path,
        engine: FakeEngine | None = None,
        queued_blocks: int = 1000,
        on_sums: SumListener = IGNORE_SUMS,
    ) -> None:
        self.directory, self.engine = directory, engine or FakeEngine()
        self.disk = FaultyDisk(directory)
        self.store = TierStore(self.disk, "worker-0", FORMAT, 1000 * FORMAT.record_bytes)
        self.writer = TierWriter(self.store, self.engine.pool, on_sums=on_sums, queued_blocks=queued_blocks)

    def begin(self, settle_s: float = 0.0) -> None:
        self.writer.start()
        assert self.writer.opened.wait(10.0)
        self.writer.attach(self.engine.blocks, settle_s)

    def end(self) -> None:
        self.writer.detach(timeout_s=10.0)
        assert self.writer.close(timeout_s=10.0)

    def left(self, numbers: Sequence[int]) -> int:
        store = store_in(self.directory, blocks=1000)
        try:
            return loaded(store, numbers)
        finally:
            store.close()


def test_offered_blocks_are_written_before_the_engine_ends(tmp_path: Path) -> None:
    writing = Writing(tmp_path)
    writing.begin(settle_s=30.0)
    writing.writer.offer(names(range(40)))
    writing.end()
    assert writing.left(range(40)) == 40
    assert writing.engine.watched == 0


def test_block_with_a_broken_watch_is_not_written(tmp_path: Path) -> None:
    writing = Writing(tmp_path, FakeEngine(gone={3}, broken={5}))
    writing.begin()
    writing.writer.offer(names(range(8)))
    writing.end()
    assert (writing.left([3]), writing.left([5]), writing.left([0, 1, 2])) == (0, 0, 3)
    assert writing.writer.counters.gone_blocks == 2
    assert writing.engine.watched == 0


def test_checksums_are_passed_on_and_damaged_blocks_not_written(tmp_path: Path) -> None:
    heard: dict[bytes, int] = {}

    def take(sums: Sequence[tuple[bytes, int]]) -> frozenset[bytes]:
        assert writing.engine.watched > 0, "as long as no block may be given away unseen"
        heard.update(sums)
        return frozenset({name_of(2)})

    writing = Writing(tmp_path, FakeEngine(broken={5}), on_sums=take)
    writing.begin()
    writing.writer.offer(names(range(8)))
    writing.end()
    assert heard == {each.name: each.checksum for each in named_blocks([0, 1, 2, 3, 4, 6, 7])}
    assert (writing.left([2]), writing.left([0, 1]), writing.left([3, 4])) == (0, 2, 2)


def test_full_queue_drops_and_counts(tmp_path: Path) -> None:
    writing = Writing(tmp_path, queued_blocks=10)
    writing.begin(settle_s=30.0)
    writing.writer.offer(names(range(25)))
    assert (writing.writer.queued, writing.writer.counters.dropped_blocks) == (10, 15)
    writing.end()
    assert (writing.left(range(25)), writing.left([10])) == (10, 0)


def test_block_written_by_another_worker_is_not_written_again(tmp_path: Path) -> None:
    other = store_in(tmp_path, "prefill-0")
    writing = Writing(tmp_path)
    writing.begin(settle_s=30.0)
    writing.writer.offer(names(range(4)))
    other.put(named_blocks(range(4)))
    wait_until(lambda: writing.store.known(names(range(4))) == 4)
    writing.end()
    other.close()
    assert writing.store.counters.stored_bytes == 0


def test_full_disk_turns_writing_off_with_one_line_and_on_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writing = Writing(tmp_path)
    writing.begin()
    writing.disk.faults.failing["write"] = errno.ENOSPC
    writing.writer.offer(names(range(3)))
    wait_until(lambda: not writing.writer.health.is_on)
    writing.disk.faults.failing.clear()
    writing.writer.offer(names(range(3, 6)))
    wait_until(lambda: writing.writer.health.is_on)  # they are tried after a pause of a second
    writing.end()
    assert writing.left(range(3, 6)) == 3
    lines = [record.getMessage() for record in caplog.records if "KV tier" in record.getMessage()]
    off = [line for line in lines if "disabled for writes" in line]
    assert len(off) == 1
    assert "write" in off[0]
    assert any("enabled for writes again" in line for line in lines)


def test_folder_that_another_process_owns_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    release = RealDisk(tmp_path).claim("worker-0")
    writing = Writing(tmp_path)
    writing.begin()
    assert not writing.store.is_open
    assert "another live process" in caplog.text
    release()
    wait_until(lambda: writing.store.is_open)
    writing.writer.offer(names(range(3)))
    writing.end()
    assert writing.left(range(3)) == 3


def test_stopped_engine_loses_only_its_unwritten_blocks(tmp_path: Path) -> None:
    writing = Writing(tmp_path, FakeEngine(stopped=True))
    writing.begin()
    writing.writer.offer(names(range(3)))
    writing.end()
    assert writing.left(range(3)) == 0
    assert writing.writer.counters.gone_blocks == 3


def test_engine_that_gives_no_turn_is_not_waited_for_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.worker.tier.writer.WATCH_TIMEOUT_S", 0.01)
    writing = Writing(tmp_path, FakeEngine(answers=False))
    writing.begin()
    writing.writer.offer(names(range(3)))
    writing.end()
    assert writing.writer.counters.gone_blocks == 3


@pytest.mark.parametrize("parts", [1, 2])
def test_blocks_of_a_pool_in_parts_are_restored_into_such_a_pool(parts: int) -> None:
    shape = PoolShape(6, 64, rows=2, parts=parts)
    pool = torch.randint(256, (6 * 64,), dtype=torch.uint8)
    other, staging = torch.zeros_like(pool), Staging(3, 64)
    BlockCopier(pool, shape).copy_out([4, 0, 2], staging)
    BlockCopier(other, shape).copy_in(staging, [4, 0, 2])
    pieces, others = pool.view(parts, 6, -1), other.view(parts, 6, -1)
    assert others[:, [4, 0, 2]].equal(pieces[:, [4, 0, 2]])
    assert not others[:, [1, 3, 5]].any()


def test_blocks_are_restored_into_every_copy_of_a_pool() -> None:
    shape, pool = PoolShape(6, 64), torch.randint(256, (6 * 64,), dtype=torch.uint8)
    other, copy, staging = torch.zeros_like(pool), torch.zeros_like(pool), Staging(2, 64)
    BlockCopier(pool, shape).copy_out([4, 0], staging)
    BlockCopier(other, shape, (copy,)).copy_in(staging, [1, 5])
    assert other.any() and other.equal(copy)
    assert other.view(6, -1)[[1, 5]].equal(pool.view(6, -1)[[4, 0]])


async def test_block_overwritten_while_queued_is_never_stored_under_its_old_name(tmp_path: Path) -> None:
    """Blocks are published and evicted at once, again and again: what is stored is right, or nothing is."""
    async with tier_stack(tmp_path) as stack:
        kept: dict[bytes, bytes] = {}
        pool, memory = stack.worker.pool, stack.worker.memory.tensor
        for turn in range(60):
            hashes = [hashlib.sha256(b"%d %d" % (turn, index)).digest() for index in range(20)]

            def publish(turn: int = turn, hashes: list[bytes] = hashes) -> None:
                blocks = pool.allocate(20)  # evicts those of two turns before
                for index, block in enumerate(blocks):
                    data = hashlib.shake_256(b"%d %d" % (turn, index)).digest(64)
                    memory.view(-1, 64)[block] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                    kept[hashes[index]] = data
                    pool.publish(block, hashes[index], hashes[index - 1] if index else None)
                for block in reversed(blocks):
                    pool.release(block)

            await stack.worker.on_engine(publish)
            await asyncio.sleep(0)
        await eventually(lambda: stack.tier.state.blocks > 0)
    store = store_in_stack(tmp_path)
    staging, found = Staging(1, 64), 0
    for name, data in kept.items():
        if store.load([name], staging):
            assert store.verify([name], staging) == 1
            assert bytes(staging.block(0)) == data
            found += 1
    store.close()
    assert found > 0


def store_in_stack(directory: Path) -> TierStore:
    store = TierStore(RealDisk(directory), "w-0", STACK_FORMAT, 1000 * STACK_FORMAT.record_bytes)
    store.open()
    return store
