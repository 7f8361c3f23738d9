"""Store of named blocks in the segments of a directory: find, load, verify, append, evict.

The owner appends to its newest segment. If the owner's segments exceed their size limit, its oldest segment is removed
with all blocks (lab/benchmarks/results/memory-2026-11.md reports the cost). Segments of other owners are read, also
while they grow. Segments of another identity are never read. An owner that needs space first removes its own segments
of another identity.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from baton.kvtransfer.tier.files import Release, SegmentId, TierDisk, TierFile
from baton.kvtransfer.tier.index import SegmentSlot, TierIndex
from baton.kvtransfer.tier.records import HEADER_BYTES, SegmentFormat
from baton.kvtransfer.tier.segment import Segment, SegmentGone
from baton.kvtransfer.tier.staging import Staging

logger = logging.getLogger(__name__)
SEGMENTS = 64
"""Number of segments that fit into `size_bytes`. An eviction removes one, and so only a few of the blocks."""
LEAST_BLOCKS = 8


class NamedBlock(NamedTuple):
    name: bytes
    checksum: int
    data: memoryview


@dataclass(slots=True)
class TierCounters:
    """Counters of a store since the worker started."""

    stored_bytes: int = 0
    loaded_blocks: int = 0  # blocks that were read and passed the verification
    loaded_bytes: int = 0
    corrupt_blocks: int = 0  # blocks that were read and found damaged or truncated
    foreign_segments: int = 0  # segments of another identity, or with a damaged header
    evicted_blocks: int = 0


def least_bytes(format: SegmentFormat) -> int:
    """Return the smallest allowed `size_bytes` of a store."""
    return LEAST_BLOCKS * (HEADER_BYTES + format.record_bytes)


class TierStore:
    """Store of blocks in files. Methods raise OSError if a file fails; stored blocks are kept.

    Only one thread may call `open`, `put`, `refresh` and `close`; any thread may call the reading methods.
    """

    def __init__(self, disk: TierDisk, owner: str, format: SegmentFormat, size_bytes: int) -> None:
        """Create a store. `size_bytes`: size limit of the owner's segments, at least `least_bytes()`."""
        if size_bytes < least_bytes(format):
            least = f"{least_bytes(format)} bytes, the size of {LEAST_BLOCKS} blocks"
            raise ValueError(f"size_bytes must be at least {least}, got {size_bytes}")
        self._disk = disk
        self._owner = owner
        self._format = format
        self._segment_slots = max(1, format.slots(size_bytes // SEGMENTS))
        self._limit_bytes = size_bytes
        self._guard = threading.Lock()  # guards the index; never held during file access
        self._index = TierIndex()
        self._keys = count(1)
        self._tries = count()
        self._segments: dict[int, Segment] = {}
        self._by_id: dict[SegmentId, int] = {}
        self._foreign: dict[SegmentId, int] = {}  # sizes in bytes of the segments that are never read
        self._current: int | None = None
        self._release: Release | None = None
        self.directory_id = b""
        """Id of the directory, see `TierDisk.identify`; empty while the store is not open."""
        self.counters = TierCounters()

    def __len__(self) -> int:
        """Number of blocks that can be found."""
        return len(self._index)

    @property
    def format(self) -> SegmentFormat:
        return self._format

    @property
    def is_open(self) -> bool:
        return self._release is not None

    @property
    def own_bytes(self) -> int:
        own = [segment.size_bytes for segment in self._segments.copy().values() if segment.id.owner == self._owner]
        return sum(own) + sum(size for each, size in self._foreign.copy().items() if each.owner == self._owner)

    def open(self) -> None:
        """Claim the owner's folder and index the segments of all owners. Raises: OwnerBusy."""
        with ExitStack() as undo:
            release = self._disk.claim(self._owner)
            undo.callback(release)
            directory_id = self._disk.identify()
            undo.callback(self._give_up_all)
            for each in self._disk.segments(self._owner):
                if each.size_bytes < HEADER_BYTES:  # the writer was killed after it had created the segment
                    self._disk.remove(each.segment)
                else:
                    self._follow(each.segment, each.size_bytes)
            self._continue_newest()
            self.refresh()
            undo.pop_all()
        self._release, self.directory_id = release, directory_id

    def refresh(self) -> None:
        """Index records that other owners have written since the last call; forget segments that they have removed."""
        there: set[SegmentId] = set()
        for owner in self._disk.owners():
            if owner == self._owner:
                continue
            try:
                found = self._disk.segments(owner)
            except (FileNotFoundError, PermissionError) as error:
                logger.debug("segments of %s not read: %s", owner, error.strerror)
                continue
            for each in found:
                there.add(each.segment)
                try:
                    self._follow(each.segment, each.size_bytes)
                except (FileNotFoundError, PermissionError) as error:
                    logger.debug("segment %s not read: %s", each.segment, error.strerror)
        for segment_id in [each for each in self._by_id if each.owner != self._owner and each not in there]:
            self._forget_segment(segment_id)
        for segment_id in [each for each in self._foreign if each.owner != self._owner and each not in there]:
            del self._foreign[segment_id]

    def close(self) -> None:
        """Close the store: it finds no block any more, and another process may claim the folder."""
        if self._release is not None:
            self._give_up_all()
            self._release()
            self._release, self.directory_id = None, b""

    def known(self, names: Sequence[bytes]) -> int:
        """Return the number of leading `names` that can be found. Any thread may call it."""
        return self._index.known(names)

    def own_slots(self) -> dict[int, int]:
        """Return the number of records in each of the owner's segments, by segment number. Any thread may call it."""
        own = [(each.number, key) for each, key in self._by_id.copy().items() if each.owner == self._owner]
        with self._guard:
            return {number: self._index.slots(key) for number, key in own}

    def own_names(self, number: int, first: int, count: int) -> bytes:
        """Return names of records in the owner's segment `number`, as `TierIndex.names`; empty if the segment is gone.

        Any thread may call it.
        """
        key = self._by_id.get(SegmentId(self._owner, number))
        with self._guard:
            return b"" if key is None else self._index.names(key, first, count)

    def announce(self, names: Sequence[bytes]) -> None:
        """Hint to the system that these blocks will be loaded soon. Never fails."""
        for places in _runs(self._places(names)):
            segment = self._segments.get(places[0].segment)
            if segment is not None:
                try:
                    segment.announce(places[0].slot, len(places))
                except (OSError, SegmentGone) as error:
                    logger.debug("read-ahead hint failed: %s", error)

    def load(self, names: Sequence[bytes], staging: Staging, first_slot: int = 0) -> int:
        """Read the blocks of leading `names` into staging slots from `first_slot` on; return the number of blocks.

        Stops at a name that cannot be found, or after the last slot. The blocks may be used only after `verify`.
        """
        loaded = 0
        for places in _runs(self._places(names[: staging.slots - first_slot])):
            segment = self._segments.get(places[0].segment)
            if segment is None:
                break
            try:
                segment.load(places[0].slot, len(places), staging, into=first_slot + loaded)
            except SegmentGone:
                break
            except OSError:
                self._forget(names[loaded : loaded + len(places)])  # otherwise later prompts would fail on them too
                raise
            loaded += len(places)
        return loaded

    def try_reading(self) -> None:
        """Test the disk: read the end of a record; do nothing if there are no segments.

        Each call reads from another segment, because a segment may be damaged or cached in memory, and reading it then
        says nothing about the disk.
        Only one thread at a time may call it.
        """
        turn, segments = next(self._tries), list(self._segments.copy().values())
        for place in range(turn, turn + len(segments)):
            try:
                segments[place % len(segments)].read_end(turn)
                return
            except SegmentGone:
                continue

    def verify(self, names: Sequence[bytes], staging: Staging) -> int:
        """Verify loaded blocks; return the number of leading blocks that match their names and checksums.

        The first block that does not match is counted as corrupt and removed from the index.
        """
        right = 0
        for slot, name in enumerate(names):
            header = self._format.read_record_header(bytes(staging.header(slot)))
            if header != (name, staging.checksum(slot)):
                with self._guard:
                    self.counters.corrupt_blocks += 1
                self._forget([name])
                break
            right += 1
        with self._guard:
            self.counters.loaded_blocks += right
            self.counters.loaded_bytes += right * self._format.block_bytes
        return right

    def forget(self, name: bytes) -> None:
        """Remove the name of a damaged block from the index. Any thread may call it."""
        self._forget([name])

    def put(self, blocks: Sequence[NamedBlock]) -> None:
        """Store those of `blocks` that are not stored yet, in as few writes as possible."""
        fresh = {block.name: block for block in blocks if self._index.find(block.name) is None}
        left = list(fresh.values())
        while left:
            self._make_room()
            left = left[self._append(left) :]

    def _append(self, blocks: Sequence[NamedBlock]) -> int:
        """Append leading `blocks` to the current segment until it is full; return their number."""
        key, segment = self._writable()
        taken = blocks[: self._segment_slots - segment.slots]
        headers = [self._format.record_header(block.name, block.checksum) for block in taken]
        segment.append(headers, [block.data for block in taken])
        with self._guard:
            for block in taken:
                self._index.add(key, block.name)
            self.counters.stored_bytes += len(taken) * self._format.record_bytes
        return len(taken)

    def _writable(self) -> tuple[int, Segment]:
        """Return the current segment and its key; if it is full, those of a new segment."""
        if self._current is not None:
            segment = self._segments[self._current]
            if segment.slots < self._segment_slots:
                return self._current, segment
        own = [each.number for each in (*self._by_id, *self._foreign) if each.owner == self._owner]
        segment_id = SegmentId(self._owner, max(own, default=0) + 1)
        try:
            file = self._disk.create(segment_id)
        except FileExistsError:  # created by another process: count it as an own segment, try the next number
            there = self._disk.segments(self._owner)
            for each in there:
                self._follow(each.segment, each.size_bytes)
            segment_id = SegmentId(self._owner, max(there).segment.number + 1)
            file = self._disk.create(segment_id)
        with ExitStack() as undo:
            undo.callback(self._disk.remove, segment_id)
            undo.callback(file.close)
            file.write([memoryview(self._format.header)], 0)
            undo.pop_all()
        self._current = self._adopt(segment_id, file, HEADER_BYTES)
        return self._current, self._segments[self._current]

    def _make_room(self) -> None:
        wanted_bytes = self._format.offset(self._segment_slots)
        while self.own_bytes + wanted_bytes > self._limit_bytes:
            foreign = min((each for each in self._foreign if each.owner == self._owner), default=None)
            if foreign is not None:
                self._disk.remove(foreign)
                del self._foreign[foreign]
                continue
            current = None if self._current is None else self._segments[self._current].id
            own = [each for each in self._by_id if each.owner == self._owner and each != current]
            if not own:
                return
            self._evict(min(own))

    def _evict(self, segment_id: SegmentId) -> None:
        self._disk.remove(segment_id)
        self.counters.evicted_blocks += self._forget_segment(segment_id)

    def _follow(self, segment_id: SegmentId, size_bytes: int) -> None:
        """Index the records of a segment that are not indexed yet."""
        key = self._by_id.get(segment_id)
        if key is None:
            if size_bytes < HEADER_BYTES or segment_id in self._foreign:
                return
            file = self._disk.open(segment_id, writable=segment_id.owner == self._owner)
            with ExitStack() as undo:
                undo.callback(file.close)
                raw = bytearray(HEADER_BYTES)
                file.read([memoryview(raw)], 0)
                if not self._format.is_ours(bytes(raw)):
                    self._foreign[segment_id] = size_bytes
                    self.counters.foreign_segments += 1
                    return
                undo.pop_all()
            key = self._adopt(segment_id, file, size_bytes)
        segment = self._segments[key]
        segment.size_bytes = max(segment.size_bytes, size_bytes)
        for header in segment.headers(self._index.slots(key), segment.slots):
            with self._guard:
                self._index.add(key, None if header is None else header.name)

    def _adopt(self, segment_id: SegmentId, file: TierFile, size_bytes: int) -> int:
        key = next(self._keys)
        self._segments[key] = Segment(segment_id, file, self._format, size_bytes)
        self._by_id[segment_id] = key
        return key

    def _continue_newest(self) -> None:
        """Make the newest segment of an earlier process the current one; cut off its last record if incomplete."""
        own = [each for each in self._by_id if each.owner == self._owner]
        if own:
            self._current = self._by_id[max(own)]
            self._segments[self._current].cut()

    def _places(self, names: Sequence[bytes]) -> Iterator[SegmentSlot]:
        """Yield the places of `names` up to the first name that cannot be found."""
        for name in names:
            place = self._index.find(name)
            if place is None:
                return
            yield place

    def _forget(self, names: Sequence[bytes]) -> None:
        with self._guard:
            for name in names:
                self._index.forget(name)

    def _forget_segment(self, segment_id: SegmentId) -> int:
        """Remove a segment from the index; return the number of blocks that were removed with it."""
        key = self._by_id.pop(segment_id)
        with self._guard:
            dropped = self._index.drop(key)
        self._segments.pop(key).give_up()
        return dropped

    def _give_up_all(self) -> None:
        for segment_id in list(self._by_id):
            self._forget_segment(segment_id)
        self._foreign.clear()
        self._current = None


def _runs(places: Iterator[SegmentSlot]) -> Iterator[list[SegmentSlot]]:
    """Split places into runs of consecutive slots."""
    run: list[SegmentSlot] = []
    for place in places:
        if run and (place.segment, place.slot) != (run[-1].segment, run[-1].slot + 1):
            yield run
            run = []
        run.append(place)
    if run:
        yield run
