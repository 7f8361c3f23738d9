"""Index of stored blocks by name and segment, in memory. Pure.

The index keeps only the first 8 bytes of each name. Whoever reads a block must compare its complete name.
"""

import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple

SLOT_BITS = 32
_SLOT_MASK = (1 << SLOT_BITS) - 1
NO_KEY = 0
"""Key of a damaged record, which no name matches."""


class SegmentSlot(NamedTuple):
    segment: int  # segment number, chosen by the caller
    slot: int


class TierIndex:
    """Index from a block's name to the first place that was added for it. Any thread may call `find`."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._keys: dict[int, array[int]] = {}  # per segment number: key of each record, in order of slots

    def __len__(self) -> int:
        """Number of blocks that can be found."""
        return len(self._places)

    def find(self, name: bytes) -> SegmentSlot | None:
        found = self._places.get(_key(name))
        return None if found is None else SegmentSlot(found >> SLOT_BITS, found & _SLOT_MASK)

    def known(self, names: Sequence[bytes]) -> int:
        """Return the number of leading `names` that can be found."""
        for count, name in enumerate(names):
            if _key(name) not in self._places:
                return count
        return len(names)

    def slots(self, segment: int) -> int:
        """Number of records that were added for the segment."""
        return len(self._keys[segment]) if segment in self._keys else 0

    def names(self, segment: int, first: int, count: int) -> bytes:
        """Return the first 8 bytes of each record's name, from slot `first` on; 8 zero bytes for a damaged record.

        `count`: maximum number of records.
        """
        keys = self._keys.get(segment, array("Q"))[first : first + count]
        if sys.byteorder == "big":
            keys.byteswap()
        return keys.tobytes()

    def add(self, segment: int, name: bytes | None) -> None:
        """Add the next record of the segment. `name`: None if the record is damaged."""
        keys = self._keys.setdefault(segment, array("Q"))
        key = NO_KEY if name is None else _key(name)
        if name is not None:
            self._places.setdefault(key, segment << SLOT_BITS | len(keys))
        keys.append(key)

    def forget(self, name: bytes) -> None:
        """Remove the name of a damaged block, so that it can be stored again."""
        self._places.pop(_key(name), None)

    def drop(self, segment: int) -> int:
        """Remove a segment and return how many blocks could be found in it."""
        dropped = 0
        for slot, key in enumerate(self._keys.pop(segment, ())):
            if self._places.get(key) == segment << SLOT_BITS | slot:
                del self._places[key]
                dropped += 1
        return dropped


def _key(name: bytes) -> int:
    return int.from_bytes(name[:8], "little") or 1  # never 0, which is NO_KEY
