"""Memory above files: a block comes from the fastest level that has it, and what is damaged at one is nowhere."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.kvtransfer.tier.levels import TierLevels
from baton.kvtransfer.tier.memory import MemoryDisk
from baton.kvtransfer.tier.staging import Staging
from baton.kvtransfer.tier.store import TierStore
from tests.fixtures.tier_blocks import FORMAT, bytes_of, loaded, name_of, named_blocks, segment_files, store_in

Memory = Callable[..., TierStore]


@pytest.fixture
def memory() -> Iterator[Memory]:
    """Makes stores, for as many blocks, and closes them in the end."""
    made: list[TierStore] = []

    def make(blocks: int = 640) -> TierStore:
        made.append(store_in(MemoryDisk(), blocks=blocks))
        return made[-1]

    yield make
    for store in made:
        store.close()
    assert open_segments() == 0, "memory was not given back"


def read(levels: TierLevels, numbers: list[int], slots: int = 64) -> int:
    """How many come back, from the first on; asserts that those are the right ones."""
    names, staging = [name_of(number) for number in numbers], Staging(slots, FORMAT.block_bytes)
    right = levels.verify(names[: levels.load(names, staging)], staging)
    for slot, number in enumerate(numbers[:right]):
        assert bytes(staging.block(slot)) == bytes_of(number)
    return right


def open_segments() -> int:
    links = (link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    return sum("memfd:baton-tier-" in str(link) for link in links)


def test_memory_blocks_equal_what_was_put(memory: Memory) -> None:
    store = memory()
    store.put(named_blocks(range(30)))
    assert loaded(store, range(30)) == 30
    store.close()
    assert store.known([name_of(0)]) == 0


def test_oldest_blocks_in_memory_make_room_and_their_memory_is_free(memory: Memory) -> None:
    store = memory(blocks=64)
    for number in range(400):
        store.put(named_blocks([number]))
    assert store.known([name_of(399)]) == 1 and store.known([name_of(0)]) == 0
    assert store.own_bytes <= 64 * (FORMAT.record_bytes + 64)
    assert open_segments() <= 64


def test_prompt_with_blocks_at_several_levels_is_complete(memory: Memory, tmp_path: Path) -> None:
    fast, slow = memory(), store_in(tmp_path)
    fast.put(named_blocks([3, 4, 7]))
    slow.put(named_blocks([0, 1, 2, 3, 5, 6]))
    levels = TierLevels([fast, slow])
    assert levels.known([name_of(number) for number in range(20)]) == 8
    assert read(levels, list(range(20))) == 8
    assert read(levels, list(range(20)), slots=5) == 5


def test_any_split_over_three_levels_is_one(memory: Memory, tmp_path: Path) -> None:
    for seed in range(30):
        draw = random.Random(seed)
        stores = [memory(), memory(), store_in(tmp_path / str(seed))]
        for store in stores:
            store.put(named_blocks(draw.sample(range(40), draw.randrange(1, 30))))
        levels = TierLevels(stores)
        first = next(number for number in range(41) if not any(store.known([name_of(number)]) for store in stores))
        assert levels.known([name_of(number) for number in range(40)]) == first
        assert read(levels, list(range(40))) == first


def test_faster_level_is_read_where_both_have_a_block(memory: Memory, tmp_path: Path) -> None:
    fast, slow = memory(), store_in(tmp_path)
    for store in (fast, slow):
        store.put(named_blocks(range(4)))
    for path in segment_files(tmp_path):
        path.write_bytes(b"")  # would show
    assert read(TierLevels([fast, slow]), [0, 1, 2, 3]) == 4


def test_damaged_block_is_not_found_again_at_any_level(memory: Memory, tmp_path: Path) -> None:
    fast, slow = memory(), store_in(tmp_path)
    slow.put(named_blocks(range(4)))
    [path] = segment_files(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[64 + 2 * FORMAT.record_bytes + 100] ^= 1  # in the third block
    path.write_bytes(raw)
    levels = TierLevels([fast, slow])
    assert read(levels, [0, 1, 2, 3]) == 2
    assert levels.known([name_of(number) for number in range(4)]) == 2
