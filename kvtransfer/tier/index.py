"""Which blocks are in which segment: names and numbers, no files. Pure.

Of a name its first 8 bytes are kept; that a block has the whole name is seen when it is read.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

SLOT_BITS = 32
_SLOT_MASK = (1 << SLOT_BITS) - 1
NO_KEY = 0


class Place(NamedTuple):
    segment: int  # a key of the caller's
    slot: int


@dataclass(slots=True)
class _Contents:
    """Of a segment, by slot. NO_KEY: a record that cannot be found under any name, since it is damaged."""

    keys: "array[int]" = field(default_factory=lambda: array("Q"))
    used: bytearray = field(default_factory=bytearray)


class TierIndex:
    """At most one place for each name: the first that was added. `find` may be called from any thread."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._segments: dict[int, _Contents] = {}

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._places)

    def find(self, name: bytes) -> Place | None:
        found = self._places.get(_key(name))
        return None if found is None else Place(found >> SLOT_BITS, found & _SLOT_MASK)

    def known(self, names: Sequence[bytes]) -> int:
        """How many of `names`, from the first on, can be found."""
        for count, name in enumerate(names):
            if _key(name) not in self._places:
                return count
        return len(names)

    def slots(self, segment: int) -> int:
        """Records of it that were added."""
        return len(self._segments[segment].keys) if segment in self._segments else 0

    def add(self, segment: int, name: bytes | None) -> None:
        """The segment's next record. None: a damaged one."""
        contents = self._segments.setdefault(segment, _Contents())
        key = NO_KEY if name is None else _key(name)
        if name is not None:
            self._places.setdefault(key, segment << SLOT_BITS | len(contents.keys))
        contents.keys.append(key)
        contents.used.append(0)

    def forget(self, name: bytes) -> None:
        """It turned out to be damaged: not to be found again at this place."""
        self._places.pop(_key(name), None)

    def mark_used(self, place: Place) -> None:
        """It was read: see `worth_keeping`."""
        if place.segment in self._segments:
            self._segments[place.segment].used[place.slot] = 1

    def used(self, segment: int) -> Iterator[tuple[int, bool]]:
        """Each slot whose block is found there, and whether it was read since it was written."""
        contents = self._segments.get(segment, _Contents())
        for slot, key in enumerate(contents.keys):
            if self._places.get(key) == segment << SLOT_BITS | slot:
                yield slot, bool(contents.used[slot])

    def drop(self, segment: int) -> int:
        """Nothing of it can be found any more; returns how many blocks could."""
        contents = self._segments.pop(segment, _Contents())
        dropped = 0
        for slot, key in enumerate(contents.keys):
            if self._places.get(key) == segment << SLOT_BITS | slot:
                del self._places[key]
                dropped += 1
        return dropped


def _key(name: bytes) -> int:
    return int.from_bytes(name[:8], "little") or 1  # NO_KEY stands for none
