"""The checksums that cached blocks had when they were first summed, and what was found since. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto


class Verdict(Enum):
    FIRST = auto()  # nothing was known: this is what it is held against from now on
    RIGHT = auto()
    CORRUPT = auto()


@dataclass(slots=True)
class RestCounters:
    """Counters since the start."""

    checked_at_rest_blocks: int = 0
    corrupt_at_rest_blocks: int = 0  # of those


class KnownSums:
    """Checksums by name of blocks in the cache, at most as many as it has."""

    def __init__(self) -> None:
        self._sums: dict[bytes, int] = {}
        self.counters = RestCounters()

    def __len__(self) -> int:
        return len(self._sums)

    def __contains__(self, name: bytes) -> bool:
        return name in self._sums

    def learn(self, name: bytes, checksum: int) -> None:
        """Record the checksum of a block as it was published; a known block is not changed."""
        self._sums.setdefault(name, checksum)

    def differs(self, name: bytes, checksum: int) -> bool:
        """Return whether a block differs from its known checksum. Any thread."""
        return self._sums.get(name, checksum) != checksum

    def compare(self, name: bytes, checksum: int) -> Verdict:
        """A block that is corrupt is forgotten: it is to be dropped."""
        known = self._sums.get(name)
        if known is None:
            self._sums[name] = checksum
            return Verdict.FIRST
        self.counters.checked_at_rest_blocks += 1
        if known == checksum:
            return Verdict.RIGHT
        self.counters.corrupt_at_rest_blocks += 1
        del self._sums[name]
        return Verdict.CORRUPT

    def clear(self) -> None:
        """The cache is another's from now on."""
        self._sums.clear()

    def forget(self, names: Iterable[bytes]) -> None:
        """Forget names that were evicted, or published again: other bytes may be under them."""
        for name in names:
            self._sums.pop(name, None)
