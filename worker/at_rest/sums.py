"""First checksum of each cached block, with which later checksums are compared. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class RestCounters:
    """Counts of checksum comparisons since the worker's start."""

    checked_at_rest_blocks: int = 0
    corrupt_at_rest_blocks: int = 0  # blocks whose checksum differed


class KnownSums:
    """Known checksums of cached blocks, by block name."""

    def __init__(self) -> None:
        self._sums: dict[bytes, int] = {}
        self.counters = RestCounters()

    def __len__(self) -> int:
        return len(self._sums)

    def __contains__(self, name: bytes) -> bool:
        return name in self._sums

    def learn(self, name: bytes, checksum: int) -> None:
        """Record the checksum of a block, unless one is known already."""
        self._sums.setdefault(name, checksum)

    def differs(self, name: bytes, checksum: int) -> bool:
        """Return whether a block differs from its known checksum. Any thread may call it."""
        return self._sums.get(name, checksum) != checksum

    def matches(self, name: bytes, checksum: int) -> bool:
        """Return whether a block matches its known checksum, and count the comparison. Learn the checksum of an unknown
        block; forget the checksum of a corrupt one.
        """
        if name not in self._sums:
            self._sums[name] = checksum
            return True
        self.counters.checked_at_rest_blocks += 1
        if self._sums[name] == checksum:
            return True
        self.counters.corrupt_at_rest_blocks += 1
        del self._sums[name]
        return False

    def clear(self) -> None:
        """Forget all checksums, because the cache is gone."""
        self._sums.clear()

    def forget(self, names: Iterable[bytes]) -> None:
        """Forget the checksums of blocks that were evicted or published again, since their bytes may differ."""
        for name in names:
            self._sums.pop(name, None)
