"""From files into a pool in several turns: what is counted is there, right, from the first block on."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton.kvtransfer.slices import PoolShape
from baton.kvtransfer.tier import loader as module
from baton.kvtransfer.tier.loader import TierLoader
from baton.kvtransfer.tier.staging import BlockCopier
from baton.kvtransfer.tier.store import TierStore
from tests.fixtures.faulty_disk import FaultyDisk
from tests.fixtures.tier_blocks import FORMAT, bytes_of, name_of, named_blocks, segment_files, store_in

BLOCKS = 50
NUMBERS = list(range(BLOCKS))
NAMES = [name_of(number) for number in NUMBERS]


class World:
    """A pool whose block n is to get the KV of number BLOCKS - 1 - n, and files that have all numbers."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.disk = FaultyDisk(directory)
        self.store: TierStore = store_in(self.disk, blocks=64 * BLOCKS)
        self.store.put(named_blocks(NUMBERS))
        self.memory = torch.zeros(BLOCKS * FORMAT.block_bytes, dtype=torch.uint8)
        self.loader = TierLoader(self.store, BlockCopier(self.memory, PoolShape(BLOCKS, FORMAT.block_bytes)))
        self.blocks = NUMBERS[::-1]

    def right(self) -> int:
        """How many blocks of the pool, from the first wanted on, are what they should be."""
        for count, (number, block) in enumerate(zip(NUMBERS, self.blocks, strict=True)):
            if bytes(self.memory.view(BLOCKS, -1)[block].numpy()) != bytes_of(number):
                return count
        return BLOCKS

    def damage(self, number: int) -> None:
        [path] = segment_files(self.directory)
        raw = bytearray(path.read_bytes())
        raw[FORMAT.offset(number) + 99] ^= 1
        path.write_bytes(raw)


@pytest.fixture(params=[1, 4, 7, 64])
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[World]:
    """With stagings of so many blocks."""
    monkeypatch.setattr(module, "STAGING_BYTES", request.param * FORMAT.block_bytes)
    made = World(tmp_path)
    yield made
    made.loader.close()
    made.store.close()


def test_all_blocks_are_copied_to_their_destinations(world: World) -> None:
    assert world.loader.load(NAMES, world.blocks) == BLOCKS
    assert world.right() == BLOCKS


@pytest.mark.parametrize("damaged", [0, 6, 7, 13, 49])
def test_damaged_block_ends_the_count_whichever_turn_it_is_in(world: World, damaged: int) -> None:
    world.damage(damaged)
    assert world.loader.load(NAMES, world.blocks) == damaged
    assert world.right() >= damaged


def test_names_that_the_files_do_not_have_end_the_count(world: World) -> None:
    names = [*NAMES[:9], name_of(1000), *NAMES[10:]]
    assert world.loader.load(names, world.blocks) == 9


def test_cancelled_load_keeps_what_has_arrived(world: World) -> None:
    asked: list[bool] = []

    def go_on() -> bool:
        asked.append(True)
        return len(asked) < 2

    came = world.loader.load(NAMES, world.blocks, go_on)
    assert 0 < came <= BLOCKS
    assert world.right() >= came
    assert world.loader.load(NAMES, world.blocks) == BLOCKS, "it can be used again"


def test_read_that_fails_is_raised_when_nothing_is_copied_any_more(world: World) -> None:
    world.disk.faults.failing["read"] = errno.EIO
    with pytest.raises(OSError, match="read"):
        world.loader.load(NAMES, world.blocks)
    world.disk.faults.failing.clear()
    before = world.memory.clone()
    assert world.loader.load(NAMES, world.blocks) in (0, BLOCKS)  # the first ones are forgotten
    assert not before.any()
