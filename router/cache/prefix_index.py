"""Index of the blocks of all workers' prefix caches. Pure state; workers are named by endpoint.

The index answers for all workers in one walk which of them hold how many of a prompt's blocks. Each worker has two
lanes, bits of one number per block. *Ready*: the worker has reported the block. *Found*: a prompt that is sent now will
find it there, which includes blocks that a prompt in flight is expected to make. A worker's blocks are closed under
parents (with a block comes its whole prefix), so the walk can bisect: a few lookups for every place where lanes end,
however long the prompt is.

Memory, measured: 160 to 200 bytes per block that one worker has, as full as the tables happen to be; 32 more where over
four workers make the number too large to be shared, and 40 to 105 for each further worker.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

ELSEWHERE_CHAINS = 64
"""Per worker, of prompts that other routers placed there: older ones are known from the worker by then, or failed."""

MOST_ENDS = 4096  # sets of lanes whose workers are remembered


class Hits(NamedTuple):
    """Blocks of a prompt, from its beginning, by worker; a worker that has none is left out."""

    found: dict[str, int]  # by the time that the prompt is computed there
    ready: dict[str, int]  # now


class _Ends(NamedTuple):
    """Lanes of one set of workers."""

    found: tuple[str, ...]
    ready: tuple[str, ...]


@dataclass(slots=True)
class _Holder:
    """The blocks of one worker. Its lanes are bits `2 * slot`, ready, and the one above it, found."""

    slot: int
    ready: set[bytes] = field(default_factory=set)
    expected: dict[object, list[bytes]] = field(default_factory=dict)  # by owner; may have become ready since
    elsewhere: deque[object] = field(default_factory=deque)  # the owners that are no attempts of ours
    digest: int = 0

    @property
    def found_lane(self) -> int:
        return 2 << 2 * self.slot

    @property
    def lanes(self) -> int:
        return 3 << 2 * self.slot


class PrefixIndex:
    """The blocks of all workers. Workers are named; an unknown one holds nothing."""

    def __init__(self) -> None:
        self._lanes: dict[bytes, int] = {}  # by block
        self._holders: dict[str, _Holder] = {}
        self._names: list[str | None] = []  # by slot; None: free
        self._ends_of: dict[int, _Ends] = {}  # of lanes that were asked for; few of all there could be

    def __len__(self) -> int:
        """Different blocks, on any worker."""
        return len(self._lanes)

    def blocks(self, worker: str) -> int:
        """Return the number of blocks that are ready on the worker."""
        holder = self._holders.get(worker)
        return 0 if holder is None else len(holder.ready)

    def digest(self, worker: str) -> int:
        """Exclusive or of the first 8 bytes, little-endian, of the hashes that are ready there."""
        holder = self._holders.get(worker)
        return 0 if holder is None else holder.digest

    def store(self, worker: str, block_hashes: Iterable[bytes]) -> None:
        """The worker has these blocks."""
        holder, lanes = self._holder(worker), self._lanes
        ready, both = holder.ready, holder.lanes
        for block_hash in block_hashes:
            if block_hash not in ready:
                ready.add(block_hash)
                lanes[block_hash] = lanes.get(block_hash, 0) | both
                holder.digest ^= int.from_bytes(block_hash[:8], "little")

    def evict(self, worker: str, block_hashes: Iterable[bytes]) -> None:
        """The worker has these no more; of those that it never had nothing changes."""
        holder = self._holder(worker)
        for block_hash in block_hashes:
            if block_hash in holder.ready:
                holder.ready.remove(block_hash)
                self._clear(block_hash, holder.lanes)
                holder.digest ^= int.from_bytes(block_hash[:8], "little")

    def replace(self, worker: str, block_hashes: Iterable[bytes]) -> Set[bytes]:
        """The worker has these blocks and no others; expected blocks stay expected. Returns those that it had before
        and has no more.
        """
        wanted = set(block_hashes)
        gone = self._holder(worker).ready - wanted
        self.evict(worker, gone)
        self.store(worker, wanted)
        return gone

    def ready(self, worker: str) -> Set[bytes]:
        """The names of its blocks."""
        holder = self._holders.get(worker)
        return set() if holder is None else holder.ready

    def holders(self, block_hash: bytes) -> tuple[str, ...]:
        """The workers where this block is ready."""
        lanes = self._lanes.get(block_hash, 0)
        return self._name(lanes).ready if lanes else ()

    def expect(self, worker: str, owner: object, block_hashes: Sequence[bytes]) -> None:
        """A prompt in flight is to make these blocks there: they count as found until `settle`, and then if ready."""
        holder, lanes = self._holder(worker), self._lanes
        found, new = holder.found_lane, []
        for block_hash in block_hashes:
            held = lanes.get(block_hash, 0)
            if not held & found:
                lanes[block_hash] = held | found
                new.append(block_hash)
        if new:
            holder.expected[owner] = new

    def expect_elsewhere(self, worker: str, block_hashes: Sequence[bytes]) -> None:
        """Expect the blocks of a prompt whose end is not reported to this router."""
        holder, owner = self._holder(worker), object()
        holder.elsewhere.append(owner)
        self.expect(worker, owner, block_hashes)
        if len(holder.elsewhere) > ELSEWHERE_CHAINS:
            self.settle(worker, holder.elsewhere.popleft())

    def settle(self, worker: str, owner: object) -> Sequence[bytes]:
        """End the expectations of a prompt, and return the expected blocks that the worker did not report."""
        holder = self._holders.get(worker)
        if holder is None:
            return ()
        missing = [each for each in holder.expected.pop(owner, ()) if each not in holder.ready]
        for block_hash in missing:
            self._clear(block_hash, holder.found_lane)
        return missing

    def forget(self, worker: str) -> None:
        """The worker's process is gone, and its pool with it."""
        holder = self._holders.pop(worker, None)
        if holder is None:
            return
        for block_hash in chain(holder.ready, *holder.expected.values()):
            self._clear(block_hash, holder.lanes)
        self._names[holder.slot] = None
        self._ends_of.clear()

    def hits(self, block_hashes: Sequence[bytes]) -> Hits:
        """Return the number of blocks of this prompt, from its beginning, on each worker."""
        found: dict[str, int] = {}
        ready: dict[str, int] = {}
        for blocks, lanes in self._ends(block_hashes):
            ends = self._ends_of.get(lanes) or self._name(lanes)
            for name in ends.found:
                found[name] = blocks
            for name in ends.ready:
                ready[name] = blocks
        return Hits(found, ready)

    def _name(self, lanes: int) -> _Ends:
        if len(self._ends_of) == MOST_ENDS:
            self._ends_of.clear()
        named = [(slot, name) for slot, name in enumerate(self._names) if name is not None]
        found = tuple(name for slot, name in named if lanes >> 2 * slot & 2)
        ready = tuple(name for slot, name in named if lanes >> 2 * slot & 1)
        return self._ends_of.setdefault(lanes, _Ends(found, ready))

    def _ends(self, block_hashes: Sequence[bytes]) -> Iterator[tuple[int, int]]:
        """(blocks, lanes): all these lanes end behind so many blocks, one at least. Each lane once."""
        if not block_hashes:
            return
        get = self._lanes.get
        held = get(block_hashes[0], 0)
        parts = [(1, len(block_hashes), held)] if held else []
        while parts:  # lanes that end at `low`, at `high` or between them
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
            holder = self._holders[worker] = _Holder(slot)
        return holder

    def _clear(self, block_hash: bytes, lanes: int) -> None:
        left = self._lanes.get(block_hash, 0) & ~lanes
        if left:
            self._lanes[block_hash] = left
        else:
            self._lanes.pop(block_hash, None)
