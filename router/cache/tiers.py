"""Workers' files as a router follows them: which blocks lie in which directory, who reads it. Pure state.

Each worker announces its own folder. All that report one directory read each other's folders, so a block that any of
them has announced can be loaded by each of them. A folder stays known when its worker is gone, as long as another one
that reads the directory is there; with the last of them the directory is forgotten.

Of a name its first 8 bytes are kept, as in the workers' own indices: a chance hit costs a placement that is not the
best one. Measured on two shared cores: 91 to 103 bytes a block; to take one in 0.3 to 0.5 us, to take one out as long,
to look one up for a prompt 0.1 us.

Where a method returns true, the caller asks the worker for a snapshot of its files now.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.router.cache.replica import ASK_AGAIN_S, BEHIND_S
from baton.router.types.worker import TierReport

NAME_BYTES = 8
MOST_BLOCKS = 1 << 21
"""Maximum blocks of all directories, 220 MB. Blocks beyond are unknown here; workers load them all the same."""
_DAMAGED = bytes(NAME_BYTES)


class TierPiece(NamedTuple):
    """Blocks side by side in a segment; NAME_BYTES of each name."""

    segment: int
    first_slot: int
    names: bytes


@dataclass(frozen=True, slots=True)
class TierChanges:
    """Message of the worker; `sequence` counts them from 1. Removed first."""

    sequence: int
    stored: tuple[TierPiece, ...] = ()
    removed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TierSnapshotPart:
    """Part of all that the worker's files have after the changes of `sequence`; parts count from 0."""

    sequence: int
    part: int
    parts: int
    stored: tuple[TierPiece, ...] = ()


@dataclass(slots=True)
class _Room:
    blocks: int


@dataclass(slots=True)
class _Segment:
    slots: int = 0  # that were announced
    names: bytearray = field(default_factory=bytearray)  # of those that are kept


class DirectoryBlocks:
    """The blocks of one directory."""

    def __init__(self, room: _Room) -> None:
        self._room = room  # shared by all directories
        self._copies: dict[bytes, int] = {}  # by name
        self._folders: dict[str, dict[int, _Segment]] = {}

    def __len__(self) -> int:
        """Different blocks."""
        return len(self._copies)

    def blocks_of(self, folder: str) -> int:
        return sum(len(each.names) // NAME_BYTES for each in self._folders.get(folder, {}).values())

    def store(self, folder: str, piece: TierPiece) -> bool:
        """Store a piece and return whether it continues what was announced of its segment."""
        segment = self._folders.setdefault(folder, {}).setdefault(piece.segment, _Segment())
        if piece.first_slot != segment.slots:
            return False
        copies, kept = self._copies, segment.names
        end = len(piece.names) // NAME_BYTES * NAME_BYTES
        for begin in range(0, end, NAME_BYTES):
            name = piece.names[begin : begin + NAME_BYTES]
            if name == _DAMAGED:
                continue
            if name in copies:
                copies[name] += 1
            elif self._room.blocks > 0:
                copies[name] = 1
                self._room.blocks -= 1
            else:
                continue
            kept += name
        segment.slots += end // NAME_BYTES
        return True

    def remove(self, folder: str, number: int) -> None:
        """A segment, with all its blocks; it may be unknown."""
        segment = self._folders.get(folder, {}).pop(number, None)
        if segment is None:
            return
        copies, names = self._copies, bytes(segment.names)
        for begin in range(0, len(names), NAME_BYTES):
            name = names[begin : begin + NAME_BYTES]
            left = copies[name] - 1
            if left:
                copies[name] = left
            else:
                del copies[name]
                self._room.blocks += 1

    def remove_folder(self, folder: str) -> None:
        if self._folders.keys() <= {folder}:
            self.clear()
        for number in tuple(self._folders.get(folder, ())):
            self.remove(folder, number)
        self._folders.pop(folder, None)

    def clear(self) -> None:
        self._room.blocks += len(self._copies)
        self._copies, self._folders = {}, {}

    def ends(self, block_hashes: Sequence[bytes], firsts: Iterable[int]) -> dict[int, int]:
        """Return, by `first`, up to where the blocks of a prompt from that one on are here. Each block is looked up
        once.
        """
        ends: dict[int, int] = {}
        copies, end, last = self._copies, 0, len(block_hashes)
        for first in sorted(firsts):
            end = max(end, first)
            if end == first:
                while end < last and block_hashes[end][:NAME_BYTES] in copies:
                    end += 1
            ends[first] = end
        return ends


@dataclass(slots=True)
class _Directory:
    blocks: DirectoryBlocks
    readers: dict[str, None] = field(default_factory=dict)  # endpoints, in the order of their coming


@dataclass(slots=True)
class _Follower:
    """Follower of one worker's own folder, in the directory of that id."""

    folder: str
    directory_id: bytes
    follows: bool = False
    sequence: int = 0  # of the changes that are in
    asked_s: float | None = None
    behind_s: float | None = None  # since when changes are due
    snapshot: int | None = None  # sequence of the one that comes in; None: none does
    next_part: int = 0  # of that

    def ask(self, now: float) -> bool:
        """Return whether to ask: the last request had no effect for long enough."""
        self.follows, self.behind_s = False, None
        if self.asked_s is not None and now - self.asked_s <= ASK_AGAIN_S:
            return False
        self.asked_s = now
        return True


class Known(NamedTuple):
    """Known files, for an operator."""

    folder_blocks: int  # in the worker's own files
    directory_blocks: int  # different ones, in all files that it reads
    follows: bool
    directory_id: bytes


class TierDirectories:
    """The files of all workers. `now`: monotonic seconds."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._room = _Room(most_blocks)
        self.directories: dict[bytes, _Directory] = {}
        """Directories by id; empty if no worker has files."""
        self._followers: dict[str, _Follower] = {}

    def __len__(self) -> int:
        """Different blocks, added up over directories."""
        return sum(len(each.blocks) for each in self.directories.values())

    def known(self, worker: str) -> Known | None:
        """Return what is known; None: it reports no files."""
        follower = self._followers.get(worker)
        if follower is None:
            return None
        blocks = self.directories[follower.directory_id].blocks
        return Known(blocks.blocks_of(follower.folder), len(blocks), follower.follows, follower.directory_id)

    def check(self, worker: str, folder: str, tier: TierReport | None, now: float) -> bool:
        """Check with a report of the worker, whose own folder has that name."""
        if tier is None or not tier.directory_id:
            self.forget(worker)
            return False
        follower = self._followers.get(worker)
        if follower is None or (follower.folder, follower.directory_id) != (folder, tier.directory_id):
            self.forget(worker)
            follower = self._followers[worker] = _Follower(folder, tier.directory_id)
            directory = self.directories.get(tier.directory_id) or _Directory(DirectoryBlocks(self._room))
            self.directories[tier.directory_id] = directory
            directory.readers[worker] = None
        if not follower.follows:
            return follower.ask(now)
        if tier.sequence > follower.sequence:
            follower.behind_s = now if follower.behind_s is None else follower.behind_s
            return now - follower.behind_s > BEHIND_S and follower.ask(now)
        return False

    def take_changes(self, worker: str, changes: TierChanges, now: float) -> bool:
        follower = self._followers.get(worker)
        if follower is None or not follower.follows or changes.sequence <= follower.sequence:
            return False  # the snapshot will have it, or it was here before
        if changes.sequence > follower.sequence + 1:
            return follower.ask(now)
        blocks = self.directories[follower.directory_id].blocks
        for number in changes.removed:
            blocks.remove(follower.folder, number)
        if not all(blocks.store(follower.folder, piece) for piece in changes.stored):
            return follower.ask(now)
        follower.sequence, follower.behind_s = changes.sequence, None
        return False

    def take_snapshot(self, worker: str, part: TierSnapshotPart) -> None:
        """Apply a part of a snapshot. Its first part replaces what is known of the folder, the others add to it, each
        as it comes: a complete large tier would keep others waiting. One that misses a part is requested again.
        """
        follower = self._followers.get(worker)
        if follower is None or (follower.follows and part.sequence < follower.sequence):
            return
        blocks = self.directories[follower.directory_id].blocks
        if part.part == 0:
            blocks.remove_folder(follower.folder)
            follower.follows, follower.snapshot, follower.next_part = False, part.sequence, 0
        if (part.sequence, part.part) != (follower.snapshot, follower.next_part):
            return
        follower.next_part += 1
        whole = all(blocks.store(follower.folder, piece) for piece in part.stored)
        if not whole or follower.next_part == part.parts:
            follower.follows, follower.snapshot = whole, None
            follower.sequence, follower.behind_s = part.sequence, None

    def disconnected(self, worker: str) -> None:
        """Handle a possible loss of changes: the next report asks for a snapshot."""
        follower = self._followers.get(worker)
        if follower is not None:
            follower.follows, follower.asked_s = False, None

    def forget(self, worker: str) -> None:
        """Forget a worker whose process is gone, or has no files any more. Its folder stays known where others
        read it.
        """
        follower = self._followers.pop(worker, None)
        if follower is None:
            return
        directory = self.directories[follower.directory_id]
        del directory.readers[worker]
        if not directory.readers:
            directory.blocks.clear()
            del self.directories[follower.directory_id]

    def behind(self, block_hashes: Sequence[bytes], hit_blocks: Mapping[str, int]) -> dict[str, int]:
        """Return, by worker, how many blocks of a prompt are in files that it reads, right after those of its pool.

        `hit_blocks`: of the workers that are asked about. One that has none is left out.
        """
        asked: dict[bytes, list[str]] = {}
        for worker in hit_blocks:
            follower = self._followers.get(worker)
            if follower is not None:
                asked.setdefault(follower.directory_id, []).append(worker)
        found: dict[str, int] = {}
        for directory_id, workers in asked.items():
            ends = self.directories[directory_id].blocks.ends(block_hashes, {hit_blocks[each] for each in workers})
            for worker in workers:
                if (blocks := ends[hit_blocks[worker]] - hit_blocks[worker]) > 0:
                    found[worker] = blocks
        return found

    def readers(self, block_hashes: Sequence[bytes]) -> dict[str, int]:
        """The workers of directories that have the beginning of a prompt, and how many blocks that is."""
        found: dict[str, int] = {}
        for directory in self.directories.values():
            if (blocks := directory.blocks.ends(block_hashes, (0,))[0]) > 0:
                found.update(dict.fromkeys(directory.readers, blocks))
        return found
