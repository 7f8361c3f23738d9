"""In-memory disk of simulated workers: segments outlive processes, fail and are damaged."""

import errno
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.kvtransfer.tier.files import OwnerBusy, Release, SegmentId, SegmentSize, TierFile
from baton.kvtransfer.tier.records import HEADER_BYTES
from baton.lab.simulation.network.loop import CURRENT, SimulatedProcess, State


@dataclass(slots=True)
class DiskState:
    """Faults of the disk from now on. `read_error`, `write_error`: errno that calls raise; None: they succeed."""

    read_error: int | None = None
    write_error: int | None = None
    read_delay_s: float = 0.0  # additional duration of each load
    failed_calls: int = 0

    def mend(self) -> None:
        self.read_error = self.write_error = None
        self.read_delay_s = 0.0

    def check(self, error: int | None) -> None:
        """Raise the errno `error` as an OSError, unless it is None."""
        if error is not None:
            self.failed_calls += 1
            raise OSError(error, os.strerror(error))


DIRECTORY_ID = b"one for a world."  # must have 16 bytes


class SimulatedDisk:
    """`TierDisk` that all workers of a world share. A process holds an owner's lock until it releases it or dies."""

    def __init__(self, draw: random.Random, most_bytes: int) -> None:
        """Create a disk. `most_bytes`: capacity of all files together."""
        self._draw = draw
        self._most_bytes = most_bytes
        self.state = DiskState()
        self.contents: dict[SegmentId, bytearray] = {}
        self._owners: set[str] = set()
        self._locks: dict[str, SimulatedProcess] = {}

    def claim(self, owner: str) -> Release:
        self.state.check(self.state.write_error)
        holder, process = self._locks.get(owner), CURRENT.get()
        if process is None:
            raise RuntimeError("a lock can only be taken within a simulated process")
        if holder is not None and holder is not process and holder.state is not State.DEAD:
            raise OwnerBusy(errno.EWOULDBLOCK, "another running process owns it", owner)
        self._owners.add(owner)
        self._locks[owner] = process
        return lambda: self._free(owner, process)

    def identify(self) -> bytes:
        self.state.check(self.state.read_error)
        return DIRECTORY_ID

    def owners(self) -> Sequence[str]:
        self.state.check(self.state.read_error)
        return sorted(self._owners)

    def segments(self, owner: str) -> Sequence[SegmentSize]:
        self.state.check(self.state.read_error)
        own = [SegmentSize(each, len(content)) for each, content in self.contents.items() if each.owner == owner]
        return sorted(own)

    def create(self, segment: SegmentId) -> TierFile:
        self.state.check(self.state.write_error)
        if segment in self.contents:
            raise FileExistsError(errno.EEXIST, "the segment exists already", str(segment))
        self.contents[segment] = bytearray()
        return self.open(segment, writable=True)

    def open(self, segment: SegmentId, writable: bool) -> TierFile:
        if segment not in self.contents:
            raise FileNotFoundError(errno.ENOENT, "the segment does not exist", str(segment))
        return SimulatedFile(self, self.contents[segment])

    def remove(self, segment: SegmentId) -> None:
        if self.contents.pop(segment, None) is None:
            raise FileNotFoundError(errno.ENOENT, "the segment does not exist", str(segment))

    def room(self, more_bytes: int) -> int:
        """Return how many of `more_bytes` bytes still fit on the disk."""
        return max(0, min(more_bytes, self._most_bytes - sum(map(len, self.contents.values()))))

    def flip(self) -> bool:
        """Flip a bit in some block's record; return False if there is none."""
        whole = [each for each in sorted(self.contents) if len(self.contents[each]) > HEADER_BYTES]
        if not whole:
            return False
        content = self.contents[self._draw.choice(whole)]
        content[self._draw.randrange(HEADER_BYTES, len(content))] ^= 1 << self._draw.randrange(8)
        return True

    def cut(self, owner: str | None = None) -> None:
        """Truncate a segment: the newest one of `owner`, like a torn write; if `owner` is None, any segment."""
        some = [each for each in sorted(self.contents) if owner in (None, each.owner)]
        if some:
            content = self.contents[some[-1] if owner else self._draw.choice(some)]
            del content[self._draw.randint(0, len(content)) :]

    def _free(self, owner: str, process: SimulatedProcess) -> None:
        if self._locks.get(owner) is process:
            del self._locks[owner]

    def wipe(self) -> None:
        """Remove all files and owners; open files stay readable."""
        self.contents.clear()
        self._owners.clear()


@dataclass(slots=True)
class SimulatedFile:
    disk: SimulatedDisk
    content: bytearray = field(repr=False)

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        state = self.disk.state
        state.check(state.read_error)
        done = 0
        for buffer in buffers:
            piece = self.content[offset + done : offset + done + len(buffer)]
            buffer[: len(piece)] = piece
            done += len(piece)
        return done

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        state = self.disk.state
        state.check(state.write_error)
        data = b"".join(buffers)
        self.content.extend(bytes(max(0, offset - len(self.content))))
        fits = self.disk.room(max(0, offset + len(data) - len(self.content))) + len(self.content) - offset
        self.content[offset : offset + len(data)] = data[:fits]
        if fits < len(data):
            state.check(errno.ENOSPC)

    def announce(self, offset: int, size_bytes: int) -> None:
        """Do nothing: the simulated disk reads nothing ahead."""

    def truncate(self, size_bytes: int) -> None:
        self.disk.state.check(self.disk.state.write_error)
        if size_bytes <= len(self.content):
            del self.content[size_bytes:]
        else:
            self.content.extend(bytes(size_bytes - len(self.content)))

    def close(self) -> None:
        """Do nothing: a simulated file has no descriptor to close."""
