"""Workers' prefix caches as a router follows them: numbered changes, snapshots, how right it was, and what
they evicted lately. Pure state.

Workers are named by endpoint. Where a method returns true, the caller asks the worker for a snapshot now.

The index answers for all workers in one walk which of them hold how many of a prompt's blocks. Each worker has two
lanes, bits of one number per block. *Ready*: the worker has reported the block. *Found*: a prompt that is sent now will
find it there, which includes blocks that a prompt in flight is expected to make. A worker's blocks are closed under
parents (with a block comes its whole prefix), so the walk can bisect: a few lookups for every place where lanes end,
however long the prompt is.

Memory, measured: 160 to 200 bytes per block that one worker has, as full as the tables happen to be; 32 more where over
four workers make the number too large to be shared, and 40 to 105 for each further worker.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum, auto
from itertools import chain, islice
from typing import NamedTuple

from baton.router.cache.autopsy import NOWHERE, CacheLook, EvictedRun, Held, SaltedNames
from baton.router.types.worker import CacheSum

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


MOST_BLOCKS = 131_072  # about 30 MB
END_BLOCKS = 2  # the last one may have been cut short, and differs then in the next turn
MIDWAY = 4
"""A prefix that ends inside of other prompts counts as one behind which so many prompts diverged."""


class PrefixFanOut:
    """Count of prompts that continued behind a known prefix: where the newest prompts diverge.

    The end of a prompt is continued by its conversation's next turn. A system prompt or a document is continued by many
    prompts, each in its own way: a worker that computes it again has its blocks for all later prompts.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._counts: OrderedDict[bytes, int] = OrderedDict()  # by block that was one of the last of a prompt

    def placed(self, block_hashes: Sequence[bytes], known_blocks: int) -> None:
        """A prompt was placed of which so many blocks, from its beginning, were known."""
        if 0 < known_blocks <= len(block_hashes):
            last = block_hashes[known_blocks - 1]
            self._counts[last] = self._counts.get(last, MIDWAY) + 1
            self._counts.move_to_end(last)
        self.ended(block_hashes)

    def ended(self, block_hashes: Sequence[bytes]) -> None:
        """A prompt, or an answer, ends there."""
        for block_hash in block_hashes[-END_BLOCKS:]:
            self._counts.setdefault(block_hash, 0)
        while len(self._counts) > self._most_blocks:
            self._counts.popitem(last=False)

    def behind(self, block_hashes: Sequence[bytes], known_blocks: int) -> int:
        """Return the number of prompts that diverged there before; 0 if the prompt is unknown."""
        return self._counts.get(block_hashes[known_blocks - 1], MIDWAY) if 0 < known_blocks <= len(block_hashes) else 0


WINDOW_REQUESTS = 64
LEAST_REQUESTS = 16
MOST_DRIFT = 0.25
"""Beyond this share of wrong predictions the view is fetched anew. That costs little where the view was right: mere
contention, with pools far too small for their work, made one prompt in eleven wrong.
"""
RESYNC_PERIOD_S = 10.0


class CacheAudit:
    """Accuracy of one worker's view: predicted hits against hits found."""

    def __init__(self) -> None:
        self.checked_requests = 0
        self.equal_requests = 0
        self.missing_tokens = 0  # predicted and not found
        self.surplus_tokens = 0  # found and not predicted
        self._wrong: deque[bool] = deque(maxlen=WINDOW_REQUESTS)
        self._resynced_s: float | None = None

    def take(self, predicted_tokens: int, actual_tokens: int) -> None:
        self.checked_requests += 1
        self.equal_requests += predicted_tokens == actual_tokens
        self.missing_tokens += max(0, predicted_tokens - actual_tokens)
        self.surplus_tokens += max(0, actual_tokens - predicted_tokens)
        self._wrong.append(predicted_tokens != actual_tokens)

    @property
    def drift(self) -> float:
        """Share of the newest requests that were predicted wrongly."""
        return sum(self._wrong) / len(self._wrong) if self._wrong else 0.0

    def wants_resync(self, now: float) -> bool:
        """Return whether the view itself must be wrong; true at most once per interval."""
        rested = self._resynced_s is None or now - self._resynced_s >= RESYNC_PERIOD_S
        if not rested or len(self._wrong) < LEAST_REQUESTS or self.drift <= MOST_DRIFT:
            return False
        self._resynced_s = now
        self._wrong.clear()
        return True


KEPT_EVICTIONS = 16_384  # of one worker
MOST_EVICTIONS = 1 << 20  # of all workers, 150 MB: of more than 64, each has fewer
MOST_RUNS = 16
ALIKE_S, ALIKE_SHARE = 1.0, 0.1
"""Blocks that lie side by side are shown as one run where their evictions lie no further apart."""


class Evictions:
    """The newest evictions of one process, by block; of a block that went several times, the last.

    Measured on two shared cores: an eviction costs 0.2 us here, beside 1.0 us in the index, and takes 146 bytes; a
    placement that asks costs 1.2 us, or 34 us where 512 blocks were evicted.
    """

    def __init__(self, most: int = KEPT_EVICTIONS) -> None:
        self.most = most
        self._at_s: dict[bytes, float] = {}  # in order of time
        self._known_since_s: float | None = None

    def __len__(self) -> int:
        return len(self._at_s)

    def begin(self, now: float) -> None:
        """Start recording evictions, in monotonic seconds."""
        if self._known_since_s is None:
            self._known_since_s = now

    def add(self, block_hashes: Iterable[bytes], now: float) -> None:
        """Keeps at least the newest `most`, and at most an eighth more: the oldest are forgotten many at a time."""
        at_s, most = self._at_s, self.most
        for block_hash in block_hashes:
            at_s.pop(block_hash, None)
            at_s[block_hash] = now
        if len(at_s) > most + most // 8:
            for block_hash in tuple(islice(at_s, len(at_s) - most)):
                self._known_since_s = at_s.pop(block_hash)

    def known_s(self, now: float) -> float:
        """Return the length of time for which all evictions are recorded."""
        return 0.0 if self._known_since_s is None else max(0.0, now - self._known_since_s)

    def runs(self, block_hashes: Sequence[bytes], first: int, now: float) -> tuple[EvictedRun, ...]:
        """The blocks from number `first` on that were evicted, up to one that was not."""
        found: list[EvictedRun] = []
        get, blocks, oldest_s, newest_s = self._at_s.get, 0, 0.0, 0.0
        for place in range(first, len(block_hashes)):
            at_s = get(block_hashes[place])
            if at_s is None:
                break
            if oldest_s <= at_s <= newest_s:  # nearly always: many go at once, or one after another
                blocks += 1
                continue
            low_s, high_s = (min(oldest_s, at_s), max(newest_s, at_s)) if blocks else (at_s, at_s)
            if len(found) < MOST_RUNS - 1 and high_s - low_s > max(ALIKE_S, ALIKE_SHARE * (now - high_s)):
                found.append(_run(blocks, oldest_s, newest_s, now))
                blocks, low_s, high_s = 0, at_s, at_s
            blocks, oldest_s, newest_s = blocks + 1, low_s, high_s
        if blocks:
            found.append(_run(blocks, oldest_s, newest_s, now))
        return tuple(found)


def _run(blocks: int, oldest_s: float, newest_s: float, now: float) -> EvictedRun:
    return EvictedRun(blocks, max(0.0, now - newest_s), max(0.0, now - oldest_s))


ASK_AGAIN_S = 1.0
BEHIND_S = 1.0  # changes that a report counts may take so long to arrive; it may overtake them, but not by much


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """Changes in one message of a worker; `sequence` counts the messages from 1."""

    sequence: int
    stored: tuple[bytes, ...]
    evicted: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CacheSnapshotPart:
    """Part of a snapshot after the changes of `sequence`; parts count from 0."""

    sequence: int
    part: int
    parts: int
    hashes: tuple[bytes, ...]


class Wrong(StrEnum):
    """Reason why a view cannot be right."""

    GAP = auto()  # a change is missing
    BEHIND = auto()  # changes that the worker has announced do not arrive
    SUM = auto()  # the worker has other blocks
    DRIFT = auto()  # too many prompts found other blocks than predicted


class CacheReplica:
    """Keeps the worker's lane of the index right. Lives as long as the worker's process: a new epoch has a new one.

    connected, and a snapshot asked for -> it arrives: from now on changes are followed
    a change is missing, or the worker's own sum differs -> a snapshot is asked for, once a second at most

    While nothing is followed, blocks are assumed: those that ended prompts should have left there.
    """

    def __init__(self, worker: str, index: PrefixIndex) -> None:
        self.follows = False
        self.exact = False  # when it was compared with the worker's own sum for the last time
        self.sequence = 0  # of the changes that are in the index
        self.resyncs = 0  # how often something was wrong
        self.wrong: Wrong | None = None  # the reason of the last resync
        self.audit = CacheAudit()
        self.evictions = Evictions()
        self._worker = worker
        self._index = index
        self._asked_s: float | None = None  # for the last time; None: when it was connected, not known here yet
        self._behind_s: float | None = None  # since when changes are due
        self._parts: dict[int, tuple[bytes, ...]] = {}
        self._parts_of = (0, 0)  # sequence and number of parts
        self._assumed: OrderedDict[bytes, None] = OrderedDict()  # least recently used first

    def connected(self) -> None:
        """Changes that were sent before may be lost: the caller asks for a snapshot."""
        self.follows = self.exact = False
        self._asked_s = None

    def disconnected(self) -> None:
        self.follows = self.exact = False

    def take_changes(self, changes: CacheChanges, now: float) -> bool:
        if not self.follows or changes.sequence <= self.sequence:
            return False  # the snapshot will have it, or it was here before
        if changes.sequence > self.sequence + 1:
            return self.resync(Wrong.GAP, now)
        self._index.evict(self._worker, changes.evicted)
        self._index.store(self._worker, changes.stored)
        self.evictions.add(changes.evicted, now)
        self.sequence = changes.sequence
        self._behind_s = None
        return False

    def take_snapshot(self, part: CacheSnapshotPart, now: float) -> None:
        """Replace the index by a complete snapshot. An old one of a view that is followed changes nothing."""
        if self.follows and part.sequence < self.sequence:
            return
        if self._parts_of != (part.sequence, part.parts):
            self._parts, self._parts_of = {}, (part.sequence, part.parts)
        self._parts[part.part] = part.hashes
        if len(self._parts) < part.parts:
            return
        gone = self._index.replace(self._worker, (each for hashes in self._parts.values() for each in hashes))
        self.evictions.begin(now)
        self.evictions.add(gone - self._assumed.keys(), now)  # while it was not followed
        self._parts, self._parts_of = {}, (0, 0)
        self._assumed.clear()
        self.follows, self.sequence = True, part.sequence
        self._behind_s = None

    def check(self, reported: CacheSum | None, now: float) -> bool:
        """Compares with the worker's own sum in a report; None: it reports no changes, and cannot be followed."""
        if self.follows and self.audit.wants_resync(now):
            return self.resync(Wrong.DRIFT, now)
        if reported is None:
            return False
        if not self.follows:
            if self._asked_s is None:
                self._asked_s = now
            return self._ask(now)
        if reported.sequence > self.sequence:
            self._behind_s = now if self._behind_s is None else self._behind_s
            return now - self._behind_s > BEHIND_S and self.resync(Wrong.BEHIND, now)
        if reported.sequence == self.sequence:
            index, worker = self._index, self._worker
            self.exact = reported.digest == index.digest(worker) and reported.blocks == index.blocks(worker)
            return not self.exact and self.resync(Wrong.SUM, now)
        return False

    def resync(self, wrong: Wrong, now: float) -> bool:
        """The view cannot be right."""
        self.follows = self.exact = False
        self.wrong = wrong
        self._behind_s = None
        self.resyncs += 1
        return self._ask(now)

    def assume(self, block_hashes: Sequence[bytes], capacity_blocks: int) -> None:
        """A prompt that has ended there should have left these blocks; no more of them than the worker has room for.

        Nothing is assumed of a cache that is followed.
        """
        if self.follows:
            return
        for block_hash in reversed(block_hashes):  # the ends of prompts are evicted first: they become the oldest
            self._assumed[block_hash] = None
            self._assumed.move_to_end(block_hash)
        self._index.store(self._worker, block_hashes)
        while len(self._assumed) > capacity_blocks:
            self._index.evict(self._worker, (self._assumed.popitem(last=False)[0],))

    def _ask(self, now: float) -> bool:
        """Return whether the last request for a snapshot had no result for long enough."""
        if self._asked_s is not None and now - self._asked_s <= ASK_AGAIN_S:
            return False
        self._asked_s = now
        return True


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """State of a worker's view, for an operator."""

    follows: bool
    exact: bool
    blocks: int
    sequence: int
    resyncs: int
    checked_requests: int
    equal_requests: int
    missing_tokens: int
    surplus_tokens: int
    drift: float


class Caches:
    """The prefix caches of all workers, and the index of their blocks together."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self._caches: dict[str, CacheReplica] = {}
        self._salted = SaltedNames()

    def connected(self, worker: str) -> None:
        """Request a snapshot of a worker. If it was connected before, it is the same process, or was forgotten."""
        cache = self._caches.get(worker)
        if cache is None:
            cache = self._caches[worker] = CacheReplica(worker, self.index)
            self._share_evictions()
        cache.connected()

    def disconnected(self, worker: str) -> None:
        cache = self._caches.get(worker)
        if cache is not None:
            cache.disconnected()

    def forget(self, worker: str) -> None:
        """Forget a worker whose process is gone."""
        self._caches.pop(worker, None)
        self._share_evictions()
        self.index.forget(worker)

    def take_changes(self, worker: str, changes: CacheChanges, now: float) -> bool:
        cache = self._caches.get(worker)
        return cache is not None and cache.take_changes(changes, now)

    def take_snapshot(self, worker: str, part: CacheSnapshotPart, now: float) -> None:
        cache = self._caches.get(worker)
        if cache is not None:
            cache.take_snapshot(part, now)

    def check(self, worker: str, reported: CacheSum | None, now: float) -> bool:
        """Compare the view with the checksum of a report."""
        cache = self._caches.get(worker)
        return cache is not None and cache.check(reported, now)

    def wrong(self, worker: str) -> Wrong | None:
        """Return why the worker's view was dropped the last time."""
        cache = self._caches.get(worker)
        return None if cache is None else cache.wrong

    def follows(self, worker: str) -> bool:
        """Return whether the worker reports its cache; if not, call `assume` with the blocks of its prompts."""
        cache = self._caches.get(worker)
        return cache is not None and cache.follows

    def assume(self, worker: str, block_hashes: Sequence[bytes], capacity_blocks: int) -> None:
        cache = self._caches.get(worker)
        if cache is not None:
            cache.assume(block_hashes, capacity_blocks)

    def audit(self, worker: str, predicted_tokens: int, actual_tokens: int) -> None:
        """A prompt was looked up there, and this much of it was found."""
        cache = self._caches.get(worker)
        if cache is not None:
            cache.audit.take(predicted_tokens, actual_tokens)

    def look(self, worker: str, block_hashes: Sequence[bytes], hit_blocks: int, now: float) -> CacheLook:
        """Return the cache state of a prompt that is placed on the worker with `hit_blocks` present or expected."""
        cache = self._caches.get(worker)
        if cache is None:
            return CacheLook(hit_blocks, follows=False, known_s=0.0)
        evictions = cache.evictions
        evicted = evictions.runs(block_hashes, hit_blocks, now)
        return CacheLook(hit_blocks, cache.follows, evictions.known_s(now), evicted)

    def under_other_salt(self, block_hashes: Sequence[bytes], plain_hashes: Sequence[bytes], worker: str) -> Held:
        """Return how much of a prompt is cached under another salt or without one: on `worker`, if it is there too.

        `plain_hashes`: names of its first blocks without a salt; the same names if it has none.
        """
        if not plain_hashes or (not self._salted and plain_hashes[0] == block_hashes[0]):
            return NOWHERE
        best, holders = NOWHERE, None
        for blocks, (plain, own) in enumerate(zip(plain_hashes, block_hashes, strict=False), 1):
            names = self._salted.others(plain, own)
            there = {holder for name in names for holder in self.index.holders(name)}
            holders = there if holders is None else holders & there
            if not holders:
                break
            best = Held(worker if worker in holders else min(holders), blocks)
        return best

    def salted(self, block_hashes: Sequence[bytes], plain_hashes: Sequence[bytes]) -> None:
        """A prompt under a salt has ended; `plain_hashes` as for `under_other_salt`."""
        self._salted.add(plain_hashes, block_hashes)

    def status(self, worker: str) -> CacheStatus | None:
        cache = self._caches.get(worker)
        if cache is None:
            return None
        audit = cache.audit
        return CacheStatus(
            follows=cache.follows,
            exact=cache.exact,
            blocks=self.index.blocks(worker),
            sequence=cache.sequence,
            resyncs=cache.resyncs,
            checked_requests=audit.checked_requests,
            equal_requests=audit.equal_requests,
            missing_tokens=audit.missing_tokens,
            surplus_tokens=audit.surplus_tokens,
            drift=audit.drift,
        )

    def _share_evictions(self) -> None:
        """Divide the record of evictions among the workers: many workers keep fewer each."""
        most = min(KEPT_EVICTIONS, MOST_EVICTIONS // max(1, len(self._caches)))
        for cache in self._caches.values():
            cache.evictions.most = most
