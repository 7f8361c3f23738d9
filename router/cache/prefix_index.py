"""Index of the blocks of all workers' prefix caches. Pure state; workers are identified by endpoint.

One walk over a prompt's blocks finds how many of the first ones each worker has. The index has one number per block, in
which each worker has two bits, called lanes. *Ready*: the worker has reported the block. *Found*: a prompt that is sent
now will find the block, because it is ready or a prompt in flight will compute it. A worker that has a block has all
blocks before it, so the walk can bisect: it needs a few lookups per position where lanes end, for any length.

All blocks that only one worker has share one number: a number of thousands of lanes takes hundreds of bytes.

Measured memory: 160 to 200 bytes per block on one worker, depending on how full the hash tables are, and 40 to 105
bytes for each further worker that has the block.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

ELSEWHERE_CHAINS = 64
"""Maximum number of other routers' prompts per worker whose blocks are expected. Older prompts are dropped: the worker
has reported their blocks, or they have failed.
"""

MOST_ENDS = 4096  # maximum number of cached `_Ends`, one per set of lanes
_blocks_of = itemgetter(0)  # sort key of PrefixEnd


class Hits(NamedTuple):
    """Number of a prompt's first blocks that each worker has, by worker. Workers without any are left out."""

    found: dict[str, int]  # blocks that are cached or will be computed by prompts in flight
    ready: dict[str, int]  # blocks that are cached now


class _Ends(NamedTuple):
    """Workers of one set of lanes: `found` and `ready` list those whose lane of that kind is in the set."""

    found: tuple[str, ...]
    ready: tuple[str, ...]
    found_set: Set[str]
    ready_set: Set[str]


class PrefixEnd(NamedTuple):
    """Workers whose cached part of a prompt ends at the same block. A worker is at one end of each kind at most."""

    blocks: int  # number of the prompt's first blocks that these workers have
    workers: _Ends


def hits_among(ends: Iterable[PrefixEnd], workers: Set[str] | None = None) -> Hits:
    """Return the hits of these workers; None: of all workers, at the cost of a step for each."""
    found: dict[str, int] = {}
    ready: dict[str, int] = {}
    for blocks, named in ends:
        found.update(dict.fromkeys(named.found if workers is None else named.found_set & workers, blocks))
        ready.update(dict.fromkeys(named.ready if workers is None else named.ready_set & workers, blocks))
    return Hits(found, ready)


@dataclass(slots=True)
class _Holder:
    """Blocks of one worker. Its lanes are bit `2 * slot` (ready) and the bit above it (found)."""

    slot: int
    lanes: int  # both lanes: the number of all blocks that only this worker has
    found_lane: int
    ready: set[bytes] = field(default_factory=set)
    expected: dict[object, list[bytes]] = field(default_factory=dict)  # blocks by prompt; some may be ready by now
    elsewhere: deque[object] = field(default_factory=deque)  # prompts of other routers among `expected`, oldest first
    digest: int = 0


class PrefixIndex:
    """Blocks of all workers' prefix caches. An unknown worker has no blocks."""

    def __init__(self) -> None:
        self._lanes: dict[bytes, int] = {}  # by block hash: bits of the workers that have the block
        self._holders: dict[str, _Holder] = {}
        self._names: list[str | None] = []  # endpoint of the worker in each slot; None: the slot is free
        self._ends_of: dict[int, _Ends] = {}  # workers by set of lanes, cached by `_name`

    def __len__(self) -> int:
        """Return the number of different blocks on all workers."""
        return len(self._lanes)

    def blocks(self, worker: str) -> int:
        """Return the number of blocks that are ready on the worker."""
        holder = self._holders.get(worker)
        return 0 if holder is None else len(holder.ready)

    def digest(self, worker: str) -> int:
        """Return the XOR of the first 8 bytes, little-endian, of the worker's ready block hashes."""
        holder = self._holders.get(worker)
        return 0 if holder is None else holder.digest

    def store(self, worker: str, block_hashes: Iterable[bytes]) -> None:
        """Add blocks that the worker has reported: they are ready and found."""
        holder, lanes = self._holder(worker), self._lanes
        ready, both = holder.ready, holder.lanes
        for block_hash in block_hashes:
            if block_hash not in ready:
                ready.add(block_hash)
                held = lanes.get(block_hash, 0) | both
                lanes[block_hash] = both if held == both else held
                holder.digest ^= int.from_bytes(block_hash[:8], "little")

    def evict(self, worker: str, block_hashes: Iterable[bytes]) -> None:
        """Remove blocks of the worker. Blocks that it does not have are ignored."""
        holder = self._holder(worker)
        for block_hash in block_hashes:
            if block_hash in holder.ready:
                holder.ready.remove(block_hash)
                self._clear(block_hash, holder.lanes)
                holder.digest ^= int.from_bytes(block_hash[:8], "little")

    def replace(self, worker: str, block_hashes: Iterable[bytes]) -> Set[bytes]:
        """Replace the worker's ready blocks and return the removed blocks. Expected blocks stay expected."""
        wanted = set(block_hashes)
        gone = self._holder(worker).ready - wanted
        self.evict(worker, gone)
        self.store(worker, wanted)
        return gone

    def ready(self, worker: str) -> Set[bytes]:
        """Return the worker's ready blocks."""
        holder = self._holders.get(worker)
        return set() if holder is None else holder.ready

    def holders(self, block_hash: bytes) -> tuple[str, ...]:
        """Return the workers on which the block is ready."""
        lanes = self._lanes.get(block_hash, 0)
        return self._name(lanes).ready if lanes else ()

    def expect(self, worker: str, owner: object, block_hashes: Sequence[bytes]) -> None:
        """Count the blocks of a prompt in flight as found until `settle`. `owner` identifies the prompt."""
        holder, lanes = self._holder(worker), self._lanes
        found, new = holder.found_lane, []
        for block_hash in block_hashes:
            held = lanes.get(block_hash, 0)
            if not held & found:
                lanes[block_hash] = held | found if held else found
                new.append(block_hash)
        if new:
            holder.expected[owner] = new

    def expect_elsewhere(self, worker: str, block_hashes: Sequence[bytes]) -> None:
        """Count the blocks of another router's prompt as found. This router is not notified of the prompt's end."""
        holder, owner = self._holder(worker), object()
        holder.elsewhere.append(owner)
        self.expect(worker, owner, block_hashes)
        if len(holder.elsewhere) > ELSEWHERE_CHAINS:
            self.settle(worker, holder.elsewhere.popleft())

    def settle(self, worker: str, owner: object) -> Sequence[bytes]:
        """Stop expecting blocks of the prompt `owner`, and return those that the worker has not reported."""
        holder = self._holders.get(worker)
        if holder is None:
            return ()
        missing = [each for each in holder.expected.pop(owner, ()) if each not in holder.ready]
        for block_hash in missing:
            self._clear(block_hash, holder.found_lane)
        return missing

    def forget(self, worker: str) -> None:
        """Remove all blocks of a worker whose process is gone."""
        holder = self._holders.pop(worker, None)
        if holder is None:
            return
        for block_hash in chain(holder.ready, *holder.expected.values()):
            self._clear(block_hash, holder.lanes)
        self._names[holder.slot] = None
        self._ends_of.clear()

    def hits(self, block_hashes: Sequence[bytes]) -> Hits:
        """Return how many of the prompt's first blocks each worker has."""
        return hits_among(self.ends(block_hashes))

    def ends(self, block_hashes: Sequence[bytes]) -> list[PrefixEnd]:
        """Return where the cached parts of the prompt end, the longest first, and the workers that have them."""
        named = self._ends_of
        ends = [PrefixEnd(blocks, named.get(lanes) or self._name(lanes)) for blocks, lanes in self._ends(block_hashes)]
        ends.sort(key=_blocks_of, reverse=True)
        return ends

    def _name(self, lanes: int) -> _Ends:
        """Return the workers of a set of lanes. Only bytes with lanes are searched, each of which has four slots."""
        if len(self._ends_of) == MOST_ENDS:
            self._ends_of.clear()
        found, ready = list[str](), list[str]()
        for place, four in enumerate(lanes.to_bytes(-(-lanes.bit_length() // 8), "little")):
            for slot in range(4 * place, 4 * place + 4) if four else ():
                bits = four >> 2 * (slot % 4)
                name = self._names[slot] if bits & 3 else None
                if name is not None and bits & 2:
                    found.append(name)
                if name is not None and bits & 1:
                    ready.append(name)
        ends = _Ends(tuple(found), tuple(ready), frozenset(found), frozenset(ready))
        return self._ends_of.setdefault(lanes, ends)

    def _ends(self, block_hashes: Sequence[bytes]) -> Iterator[tuple[int, int]]:
        """Yield (blocks, lanes), each lane once: the workers of these lanes have exactly the first `blocks` blocks.

        Lanes without the first block are left out.
        """
        if not block_hashes:
            return
        get = self._lanes.get
        held = get(block_hashes[0], 0)
        parts = [(1, len(block_hashes), held)] if held else []
        while parts:  # each part (low, high, lanes): lanes that end behind `low` to `high` blocks
            low, high, held = parts.pop()
            while low < high:
                middle = (low + high) // 2
                beyond = get(block_hashes[middle], 0) & held
                if beyond and beyond != held:
                    parts.append((low, middle, held ^ beyond))
                if beyond:
                    low, held = middle + 1, beyond
                else:
                    high = middle
            yield low, held

    def _holder(self, worker: str) -> _Holder:
        holder = self._holders.get(worker)
        if holder is None:
            slot = next((slot for slot, name in enumerate(self._names) if name is None), len(self._names))
            self._names[slot : slot + 1] = [worker]
            self._ends_of.clear()
            holder = self._holders[worker] = _Holder(slot, 3 << 2 * slot, 2 << 2 * slot)
        return holder

    def _clear(self, block_hash: bytes, lanes: int) -> None:
        left = self._lanes.get(block_hash, 0) & ~lanes
        if left:
            self._lanes[block_hash] = left
        else:
            self._lanes.pop(block_hash, None)
