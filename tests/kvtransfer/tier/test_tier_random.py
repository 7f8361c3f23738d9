"""Random puts, loads, crashes at any byte, flips and cuts: what comes back is right, or nothing does."""

import contextlib
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.kvtransfer.tier.records import SegmentFormat
from baton.kvtransfer.tier.store import TierStore
from tests.fixtures.faulty_disk import FaultyDisk, Killed
from tests.fixtures.tier_blocks import FORMAT, loaded, name_of, named_blocks, segment_files, store_in

BLOCKS = 96
NUMBERS = st.lists(st.integers(0, 150), min_size=1, max_size=12)
OTHER = SegmentFormat(b"o" * 32, FORMAT.block_bytes)


class RandomTier(RuleBasedStateMachine):
    """`loaded` asserts that no wrong byte is given out; here stand the bound, and that whole blocks survive."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.disk = FaultyDisk(self.directory)
        self.store: TierStore = store_in(self.disk, blocks=BLOCKS)
        self.newest: Sequence[int] = ()  # that the last put wrote, if nothing was damaged since
        self.flipped = False  # perhaps the beginning of a segment, which is seen when it is opened

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.directory)

    @rule(numbers=NUMBERS)
    def put(self, numbers: list[int]) -> None:
        self.newest = [number for number in dict.fromkeys(numbers) if not self.store.known([name_of(number)])]
        self.store.put(named_blocks(numbers))

    @rule(numbers=NUMBERS)
    def load(self, numbers: list[int]) -> None:
        loaded(self.store, numbers)

    @rule()
    def load_newest(self) -> None:
        assert all(loaded(self.store, [number]) for number in self.newest)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = store_in(self.disk, blocks=BLOCKS)
        self.newest = () if self.flipped else self.newest

    @rule(numbers=NUMBERS, fits=st.integers(0, 6 * FORMAT.record_bytes))
    def killed_while_writing(self, numbers: list[int], fits: int) -> None:
        self.disk.faults.killed_after_bytes = fits
        with contextlib.suppress(Killed):
            self.store.put(named_blocks(numbers))
        self.newest = ()
        self.disk.faults.killed_after_bytes = None
        self.store.close()  # what the system does for a process that is gone
        self.store = store_in(self.disk, blocks=BLOCKS)

    @rule(numbers=NUMBERS, left=st.integers(0, 6 * FORMAT.record_bytes))
    def full_disk(self, numbers: list[int], left: int) -> None:
        self.disk.faults.left_bytes = left
        with contextlib.suppress(OSError):
            self.store.put(named_blocks(numbers))
        self.newest = ()
        self.disk.faults.left_bytes = None

    @rule(seed=st.integers(0, 2**20), flips=st.integers(1, 3))
    @precondition(lambda self: any(path.stat().st_size for path in segment_files(self.directory)))
    def flip(self, seed: int, flips: int) -> None:
        drawn = random.Random(seed)
        path = drawn.choice([path for path in segment_files(self.directory) if path.stat().st_size])
        raw = bytearray(path.read_bytes())
        for _ in range(flips):
            raw[drawn.randrange(len(raw))] ^= 1 << drawn.randrange(8)
        path.write_bytes(raw)
        self.newest, self.flipped = (), True

    @rule(seed=st.integers(0, 2**20))
    @precondition(lambda self: bool(segment_files(self.directory)))
    def cut(self, seed: int) -> None:
        drawn = random.Random(seed)
        path = drawn.choice(segment_files(self.directory))
        with path.open("r+b") as file:
            file.truncate(drawn.randrange(path.stat().st_size + 1))
        self.newest = ()
        self.store.close()
        self.store = store_in(self.disk, blocks=BLOCKS)

    @rule(numbers=NUMBERS)
    def another_model(self, numbers: list[int]) -> None:
        self.store.close()
        other = store_in(self.disk, blocks=BLOCKS, format=OTHER)
        other.put(named_blocks([number + 1000 for number in numbers], OTHER))
        other.close()
        self.store = store_in(self.disk, blocks=BLOCKS)
        self.newest = ()

    @invariant()
    def within_its_bound(self) -> None:
        sizes = [path.stat().st_size for path in segment_files(self.directory)]
        assert sum(sizes) <= BLOCKS * (FORMAT.record_bytes + 64)


TestRandomTier: type = RandomTier.TestCase
TestRandomTier.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("fits", range(0, 3 * FORMAT.record_bytes + 1, 61))
def test_killed_at_any_byte_of_a_write_the_blocks_before_are_whole(tmp_path: Path, fits: int) -> None:
    disk = FaultyDisk(tmp_path)
    store = store_in(disk, blocks=6400)
    store.put(named_blocks(range(4)))
    disk.faults.killed_after_bytes = fits
    with pytest.raises(Killed):
        store.put(named_blocks(range(4, 7)))
    disk.faults.killed_after_bytes = None
    store.close()
    store = store_in(disk, blocks=6400)
    assert loaded(store, range(7)) == 4 + fits // FORMAT.record_bytes
    store.put(named_blocks(range(4, 7)))
    assert (loaded(store, range(7)), store.counters.corrupt_blocks) == (7, 0)
    store.close()
