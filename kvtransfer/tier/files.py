"""File-system operations of the KV tier, behind an interface so that tests can inject failures.

    DIRECTORY/baton-kv.id              random id in 32 hexadecimal digits: processes that read the same id share it
    DIRECTORY/OWNER/baton-kv.lock      locked by flock(2) while the owner's process lives
    DIRECTORY/OWNER/000000000007.kv    segment of this owner; numbers ascend in the order of creation

Folders have mode 0700 and files 0600, because prompts can be reconstructed from their KV.
"""

import errno
import fcntl
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

logger = logging.getLogger(__name__)
SEGMENT_NAME = re.compile(r"(\d{12})\.kv")
LOCK_NAME = "baton-kv.lock"
ID_NAME, ID_BYTES = "baton-kv.id", 16
FOLDER_MODE, FILE_MODE = 0o700, 0o600
MOST_BUFFERS = 512  # maximum number of buffers of a system call; Linux allows 1024


class OwnerBusy(OSError):
    """Error: another live process has claimed the folder."""


class SegmentId(NamedTuple):
    owner: str
    number: int


class SegmentSize(NamedTuple):
    segment: SegmentId
    size_bytes: int


class TierFile(Protocol):
    """File of one segment. Every method raises OSError if it fails."""

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill the buffers in order; return the number of bytes read, less than requested only at the file's end."""

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Write all buffers. If this fails, any number of bytes may have been written."""

    def announce(self, offset: int, size_bytes: int) -> None:
        """Hint to the system that this range will be read soon."""

    def truncate(self, size_bytes: int) -> None:
        """Shorten the file to `size_bytes`."""

    def close(self) -> None:
        """Close the file. Call it once."""


Release = Callable[[], None]
"""Function that releases a claimed folder. Call it once."""


class TierDisk(Protocol):
    """Directory with one folder of segments per owner. Every method raises OSError if it fails."""

    def claim(self, owner: str) -> Release:
        """Claim the owner's folder, created if missing; return the function that releases it. Raises: OwnerBusy."""

    def identify(self) -> bytes:
        """Return the directory's id of ID_BYTES, created at first use; equal for all processes with this directory."""

    def owners(self) -> Sequence[str]:
        """Return the names of all owners that have a folder; folders of other programs are ignored."""

    def segments(self, owner: str) -> Sequence[SegmentSize]:
        """Return the owner's segments with their sizes, in ascending order of segment numbers."""

    def create(self, segment: SegmentId) -> TierFile:
        """Create an empty segment, and its folder if missing; open the segment for reading and writing."""

    def open(self, segment: SegmentId, writable: bool) -> TierFile:
        """Open an existing segment for reading, and for writing if `writable`."""

    def remove(self, segment: SegmentId) -> None:
        """Remove a segment. Processes that have it open can still read it."""


class RealFile:
    """An open `TierFile` of a real file system."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        done = 0
        for first in range(0, len(buffers), MOST_BUFFERS):
            wanted = [buffer for buffer in buffers[first : first + MOST_BUFFERS] if len(buffer)]
            while wanted:
                count = os.preadv(self._fd, wanted, offset + done)
                if not count:
                    return done
                done += count
                wanted = _behind(wanted, count)
        return done

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        for first in range(0, len(buffers), MOST_BUFFERS):
            left = [buffer for buffer in buffers[first : first + MOST_BUFFERS] if len(buffer)]
            while left:
                count = os.pwritev(self._fd, left, offset)
                offset += count
                left = _behind(left, count)

    def announce(self, offset: int, size_bytes: int) -> None:
        os.posix_fadvise(self._fd, offset, size_bytes, os.POSIX_FADV_WILLNEED)

    def truncate(self, size_bytes: int) -> None:
        os.ftruncate(self._fd, size_bytes)

    def close(self) -> None:
        os.close(self._fd)


def _behind(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return the buffers without their first `count` bytes."""
    left: list[memoryview] = []
    for buffer in buffers:
        skipped = min(count, len(buffer))
        count -= skipped
        if skipped < len(buffer):
            left.append(buffer[skipped:])
    return left


@dataclass(frozen=True, slots=True)
class RealDisk:
    """A `TierDisk` in a directory of a real file system, which is created at first use."""

    directory: Path

    def claim(self, owner: str) -> Release:
        folder = self._folder(owner)
        _make_private(self.directory)
        _make_private(folder)
        if stat.S_IMODE(folder.stat().st_mode) != FOLDER_MODE:
            folder.chmod(FOLDER_MODE)
        with ExitStack() as undo:
            fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
            undo.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise OwnerBusy(error.errno, "another live process owns the folder", str(folder)) from error
            undo.pop_all()
        return partial(os.close, fd)

    def identify(self) -> bytes:
        path, drawn = self.directory / ID_NAME, secrets.token_bytes(ID_BYTES)
        _make_private(self.directory)
        try:
            _write_once(path, drawn.hex().encode())
            text = path.read_bytes()
        except PermissionError as error:  # another user owns the directory, so its folders cannot be read either
            logger.warning("KV tier not shared with other workers: the directory is another user's: %s", error)
            return drawn
        try:
            found = bytes.fromhex(text.decode("ascii"))
        except ValueError:
            found = b""
        if len(found) != ID_BYTES:
            raise OSError(errno.EINVAL, "invalid directory id", str(path))
        return found

    def owners(self) -> Sequence[str]:
        with os.scandir(self.directory) as entries:
            folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        return sorted(name for name in folders if (self._folder(name) / LOCK_NAME).is_file())

    def segments(self, owner: str) -> Sequence[SegmentSize]:
        found = []
        with os.scandir(self._folder(owner)) as entries:
            for entry in entries:
                name = SEGMENT_NAME.fullmatch(entry.name)
                if name is not None and entry.is_file(follow_symlinks=False):
                    found.append(SegmentSize(SegmentId(owner, int(name[1])), _size(entry)))
        return sorted(found)

    def create(self, segment: SegmentId) -> TierFile:
        path = self._path(segment)
        _make_private(self.directory)
        _make_private(path.parent)
        return RealFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))

    def open(self, segment: SegmentId, writable: bool) -> TierFile:
        mode = os.O_RDWR if writable else os.O_RDONLY
        return RealFile(os.open(self._path(segment), mode | os.O_CLOEXEC | os.O_NOFOLLOW))

    def remove(self, segment: SegmentId) -> None:
        self._path(segment).unlink()

    def _folder(self, owner: str) -> Path:
        return self.directory / owner

    def _path(self, segment: SegmentId) -> Path:
        return self._folder(segment.owner) / f"{segment.number:012d}.kv"


def _make_private(folder: Path) -> None:
    folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)


def _write_once(path: Path, data: bytes) -> None:
    """Create a file with its complete content, atomically. If the file exists, keep it. Raises: OSError."""
    if path.exists():
        return
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        with suppress(FileExistsError):  # keep a file that another worker has just created
            os.link(draft, path)
    finally:
        draft.unlink()


def _size(entry: "os.DirEntry[str]") -> int:
    """Return the size of a file in bytes; 0 if it was removed since the folder was listed."""
    try:
        return entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0
