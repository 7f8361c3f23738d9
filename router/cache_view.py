"""One worker's prefix cache as a router follows it: numbered changes in order, a snapshot where one is missing. Pure.

connected, and a snapshot asked for -> it arrives: from now on changes are followed
a change is missing, or the worker's own sum differs -> a snapshot is asked for, once a second at most

While nothing is followed, blocks are assumed: those that ended prompts should have left there. Where a method
returns true, a snapshot is to be asked for now.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum, auto

from router.prefix_index import PrefixIndex

ASK_AGAIN_S = 1.0
BEHIND_S = 1.0  # changes that a report counts may take so long to arrive; it may overtake them, but not by much


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """One message of the worker's; `sequence` counts them from 1."""

    sequence: int
    stored: tuple[bytes, ...]
    evicted: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CacheSnapshotPart:
    """Some of all that the worker has after the changes of `sequence`; parts count from 0."""

    sequence: int
    part: int
    parts: int
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CacheSum:
    """The sum of the worker's changes: see PrefixIndex.digest."""

    sequence: int
    digest: int
    blocks: int


class Wrong(StrEnum):
    """How it shows that a view cannot be right."""

    GAP = auto()  # a change is missing
    BEHIND = auto()  # changes that the worker has announced do not arrive
    SUM = auto()  # the worker has other blocks
    DRIFT = auto()  # too many prompts found other blocks than predicted


class CacheView:
    """Keeps the worker's lane of the index right. Lives as long as the worker's process: a new epoch has a new one."""

    def __init__(self, worker: str, index: PrefixIndex) -> None:
        self.follows = False
        self.exact = False  # when it was compared with the worker's own sum for the last time
        self.sequence = 0  # of the changes that are in the index
        self.resyncs = 0  # how often something was wrong
        self.wrong: Wrong | None = None  # the reason of the last resync
        self._worker = worker
        self._index = index
        self._asked_s: float | None = None  # for the last time; None: when it was connected, not known here yet
        self._behind_s: float | None = None  # since when changes are due
        self._parts: dict[int, tuple[bytes, ...]] = {}
        self._parts_of = (0, 0)  # sequence and number of parts
        self._assumed: OrderedDict[bytes, None] = OrderedDict()  # least recently used first

    def connected(self) -> None:
        """Changes that were sent before may be lost: the caller asks for a snapshot."""
        self.follows = self.exact = False
        self._asked_s = None

    def disconnected(self) -> None:
        self.follows = self.exact = False

    def take_changes(self, changes: CacheChanges, now: float) -> bool:
        if not self.follows or changes.sequence <= self.sequence:
            return False  # the snapshot will have it, or it was here before
        if changes.sequence > self.sequence + 1:
            return self.resync(Wrong.GAP, now)
        self._index.evict(self._worker, changes.evicted)
        self._index.store(self._worker, changes.stored)
        self.sequence = changes.sequence
        self._behind_s = None
        return False

    def take_snapshot(self, part: CacheSnapshotPart, now: float) -> None:
        """All parts of a snapshot replace what the index has; an old one, of something that is followed, does not."""
        if self.follows and part.sequence < self.sequence:
            return
        if self._parts_of != (part.sequence, part.parts):
            self._parts, self._parts_of = {}, (part.sequence, part.parts)
        self._parts[part.part] = part.hashes
        if len(self._parts) < part.parts:
            return
        self._index.replace(self._worker, (each for hashes in self._parts.values() for each in hashes))
        self._parts, self._parts_of = {}, (0, 0)
        self._assumed.clear()
        self.follows, self.sequence = True, part.sequence
        self._behind_s = None

    def check(self, told: CacheSum | None, now: float) -> bool:
        """Compares with the worker's own sum in a report; None: it reports no changes, and cannot be followed."""
        if told is None:
            return False
        if not self.follows:
            if self._asked_s is None:
                self._asked_s = now
            return self._ask(now)
        if told.sequence > self.sequence:
            self._behind_s = now if self._behind_s is None else self._behind_s
            return now - self._behind_s > BEHIND_S and self.resync(Wrong.BEHIND, now)
        if told.sequence == self.sequence:
            index, worker = self._index, self._worker
            self.exact = told.digest == index.digest(worker) and told.blocks == index.blocks(worker)
            return not self.exact and self.resync(Wrong.SUM, now)
        return False

    def resync(self, wrong: Wrong, now: float) -> bool:
        """The view cannot be right."""
        self.follows = self.exact = False
        self.wrong = wrong
        self._behind_s = None
        self.resyncs += 1
        return self._ask(now)

    def assume(self, block_hashes: Sequence[bytes], capacity_blocks: int) -> None:
        """A prompt that has ended there should have left these blocks; no more of them than the worker has room for.

        Nothing is assumed of a cache that is followed.
        """
        if self.follows:
            return
        for block_hash in reversed(block_hashes):  # the ends of prompts are evicted first: they become the oldest
            self._assumed[block_hash] = None
            self._assumed.move_to_end(block_hash)
        self._index.store(self._worker, block_hashes)
        while len(self._assumed) > capacity_blocks:
            self._index.evict(self._worker, (self._assumed.popitem(last=False)[0],))

    def _ask(self, now: float) -> bool:
        """Whether nothing came of the last time for long enough."""
        if self._asked_s is not None and now - self._asked_s <= ASK_AGAIN_S:
            return False
        self._asked_s = now
        return True
