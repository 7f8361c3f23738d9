"""The hashes that entered and left a prefix cache since the last read. Knows hashes, not blocks."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """Hashes that can be found now and could not before, and the reverse. No hash is in both."""

    stored: tuple[bytes, ...]
    evicted: tuple[bytes, ...]


class CacheJournal:
    """Written by a BlockPool on its thread, read on any. A hash that came and went between two reads counts as evicted.

    `notify` is called on the writer's thread at the first change after a read, and must only schedule the next read.
    """

    def __init__(self, notify: Callable[[], None] = lambda: None) -> None:
        self._notify = notify
        self._notified = False
        self._found: deque[tuple[bytes, bool]] = deque()  # whether each can be found from then on

    def store(self, block_hash: bytes) -> None:
        self._write(block_hash, found=True)

    def evict(self, block_hash: bytes) -> None:
        self._write(block_hash, found=False)

    def take(self) -> CacheChanges | None:
        """The changes since the last call; None where there are none."""
        self._notified = False  # first: a later write is either read below or notified of
        last: dict[bytes, bool] = {}
        while self._found:
            block_hash, found = self._found.popleft()
            last[block_hash] = found
        if not last:
            return None
        stored = tuple(block_hash for block_hash, found in last.items() if found)
        return CacheChanges(stored, tuple(block_hash for block_hash, found in last.items() if not found))

    def _write(self, block_hash: bytes, found: bool) -> None:
        self._found.append((block_hash, found))
        if not self._notified:
            self._notified = True
            self._notify()
