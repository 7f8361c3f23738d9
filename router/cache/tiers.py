"""Router's view of KV in files: which blocks are in which directory, and which workers read that directory. Pure state.

Each worker announces the blocks of its own folder in a directory. All workers that report the same directory read each
other's folders. A folder stays known after its worker is gone, as long as another worker reads the directory.

Only the first 8 bytes of a block hash are kept, as in the workers' own indices: a collision can only make a placement
worse. Measured on two shared cores: 91 to 103 bytes per block; 0.3 to 0.5 us to add or remove a block, 0.1 us to look
one up.

A method that returns true tells its caller to request a snapshot of the worker's files.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.router.cache.follower import ChangeFollower
from baton.router.types.worker import TierReport

NAME_BYTES = 8
MOST_BLOCKS = 1 << 21
"""Maximum number of known blocks over all directories, 220 MB. Workers can also load blocks that are unknown here."""
_DAMAGED = bytes(NAME_BYTES)


class TierPiece(NamedTuple):
    """Adjacent blocks of a segment file. `names`: first NAME_BYTES of each block hash, concatenated."""

    segment: int
    first_slot: int
    names: bytes


@dataclass(frozen=True, slots=True)
class TierChanges:
    """Changes of a worker's files in one of its messages. `sequence`: number of the message, from 1.

    The segments in `removed` are removed before the pieces in `stored` are added.
    """

    sequence: int
    stored: tuple[TierPiece, ...] = ()
    removed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TierSnapshotPart:
    """Part of a snapshot of a worker's files after change `sequence`. `part`: its number, from 0."""

    sequence: int
    part: int
    parts: int
    stored: tuple[TierPiece, ...] = ()


@dataclass(slots=True)
class _Capacity:
    """Number of blocks that may still be added, over all directories."""

    blocks: int


@dataclass(slots=True)
class _Segment:
    slots: int = 0  # number of announced blocks
    names: bytearray = field(default_factory=bytearray)  # names of its blocks that the directory counts


class DirectoryBlocks:
    """Blocks in the files of one directory."""

    def __init__(self, capacity: _Capacity) -> None:
        self._capacity = capacity  # shared by all directories
        self._copies: dict[bytes, int] = {}  # by block name: number of copies in the directory
        self._folders: dict[str, dict[int, _Segment]] = {}

    def __len__(self) -> int:
        """Return the number of different blocks in the directory."""
        return len(self._copies)

    def blocks_of(self, folder: str) -> int:
        return sum(len(each.names) // NAME_BYTES for each in self._folders.get(folder, {}).values())

    def store(self, folder: str, piece: TierPiece) -> bool:
        """Add a piece of a worker's folder. Return False if it does not continue its segment: a message was lost."""
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
            elif self._capacity.blocks > 0:
                copies[name] = 1
                self._capacity.blocks -= 1
            else:
                continue
            kept += name
        segment.slots += end // NAME_BYTES
        return True

    def remove(self, folder: str, number: int) -> None:
        """Remove segment `number` of a worker's folder with all its blocks. An unknown segment is ignored."""
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
                self._capacity.blocks += 1

    def remove_folder(self, folder: str) -> None:
        if self._folders.keys() <= {folder}:
            self.clear()
        for number in tuple(self._folders.get(folder, ())):
            self.remove(folder, number)
        self._folders.pop(folder, None)

    def clear(self) -> None:
        self._capacity.blocks += len(self._copies)
        self._copies, self._folders = {}, {}

    def ends(self, block_hashes: Sequence[bytes], firsts: Iterable[int]) -> dict[int, int]:
        """Return, for each index in `firsts`, the index of the first block from there on that is not in the directory.

        Each block is looked up once.
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
    readers: dict[str, None] = field(default_factory=dict)  # endpoints of workers that read it, in order of report


@dataclass(slots=True, kw_only=True)
class _FolderFollower(ChangeFollower):
    """Progress in applying the changes of one worker's own folder in a directory."""

    folder: str
    directory_id: bytes
    snapshot: int | None = None  # sequence of the incomplete snapshot; None: no snapshot is incomplete
    next_part: int = 0  # number of the expected part of that snapshot


class KnownFiles(NamedTuple):
    """Status of a worker's KV files, for operators."""

    folder_blocks: int  # blocks in the worker's own files
    directory_blocks: int  # different blocks in all files that the worker can read
    follows: bool
    directory_id: bytes


class TierDirectories:
    """Router's view of the files of all workers. `now`: monotonic seconds."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._capacity = _Capacity(most_blocks)
        self.directories: dict[bytes, _Directory] = {}
        """Directories by id; empty if no worker has files."""
        self._followers: dict[str, _FolderFollower] = {}

    def __len__(self) -> int:
        """Return the sum of different blocks over all directories."""
        return sum(len(each.blocks) for each in self.directories.values())

    def known(self, worker: str) -> KnownFiles | None:
        """Return the status of a worker's files; None if the worker reports no files."""
        follower = self._followers.get(worker)
        if follower is None:
            return None
        blocks = self.directories[follower.directory_id].blocks
        return KnownFiles(blocks.blocks_of(follower.folder), len(blocks), follower.follows, follower.directory_id)

    def check(self, worker: str, folder: str, tier: TierReport | None, now: float) -> bool:
        """Compare the view with a report of the worker. `folder`: name of the worker's own folder."""
        if tier is None or not tier.directory_id:
            self.forget(worker)
            return False
        follower = self._followers.get(worker)
        if follower is None or (follower.folder, follower.directory_id) != (folder, tier.directory_id):
            self.forget(worker)
            follower = _FolderFollower(folder=folder, directory_id=tier.directory_id)
            self._followers[worker] = follower
            directory = self.directories.get(tier.directory_id) or _Directory(DirectoryBlocks(self._capacity))
            self.directories[tier.directory_id] = directory
            directory.readers[worker] = None
        return (not follower.follows or follower.is_behind(tier.sequence, now)) and follower.restart(now)

    def take_changes(self, worker: str, changes: TierChanges, now: float) -> bool:
        follower = self._followers.get(worker)
        if follower is None or follower.is_ignored(changes.sequence):
            return False
        if changes.sequence > follower.sequence + 1:
            return follower.restart(now)
        blocks = self.directories[follower.directory_id].blocks
        for number in changes.removed:
            blocks.remove(follower.folder, number)
        if not all(blocks.store(follower.folder, piece) for piece in changes.stored):
            return follower.restart(now)
        follower.applied(changes.sequence)
        return False

    def take_snapshot(self, worker: str, part: TierSnapshotPart) -> None:
        """Apply a part of a snapshot. The first part replaces the folder's blocks, and later parts add blocks.

        A snapshot that lacks a part is requested again by the next report.
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
        is_complete = all(blocks.store(follower.folder, piece) for piece in part.stored)
        if not is_complete or follower.next_part == part.parts:
            follower.follows, follower.snapshot = is_complete, None
            follower.applied(part.sequence)

    def disconnected(self, worker: str) -> None:
        """Handle a lost connection: changes may be lost, so `check` requests a snapshot at the worker's next report."""
        follower = self._followers.get(worker)
        if follower is not None:
            follower.follows, follower.asked_s = False, None

    def forget(self, worker: str) -> None:
        """Forget a worker that is gone or has no files any more. Its folder stays known while other workers read it."""
        follower = self._followers.pop(worker, None)
        if follower is None:
            return
        directory = self.directories[follower.directory_id]
        del directory.readers[worker]
        if not directory.readers:
            directory.blocks.clear()
            del self.directories[follower.directory_id]

    def behind(self, block_hashes: Sequence[bytes], hit_blocks: Mapping[str, int]) -> dict[str, int]:
        """Return, by worker, how many of a prompt's blocks it can load from files, directly after its `hit_blocks`.

        `hit_blocks`: by worker, number of the prompt's first blocks in its KV pool. Workers that can load no blocks are
        left out.
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
        """Return, by worker, how many of a prompt's first blocks it can read from files; no zeros."""
        found: dict[str, int] = {}
        for directory in self.directories.values():
            if (blocks := directory.blocks.ends(block_hashes, (0,))[0]) > 0:
                found.update(dict.fromkeys(directory.readers, blocks))
        return found
