"""Router's view of the workers' prefix caches, kept current by snapshots and numbered changes. Pure state.

Workers are identified by endpoint. A method that returns true tells its caller to request a snapshot from the worker.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum, auto

from baton.router.cache.audit import CacheAudit
from baton.router.cache.autopsy import NOWHERE, CacheLook, Held, SaltedNames
from baton.router.cache.evictions import KEPT_EVICTIONS, MOST_EVICTIONS, EvictionLog
from baton.router.cache.follower import ChangeFollower
from baton.router.cache.prefix_index import PrefixIndex
from baton.router.types.worker import CacheSum


@dataclass(frozen=True, slots=True)
class CacheUpdate:
    """Changes of a worker's prefix cache in one of its messages. `sequence`: number of the message, from 1."""

    sequence: int
    stored: tuple[bytes, ...]
    evicted: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CacheSnapshotPart:
    """Part of a snapshot of a worker's prefix cache after change `sequence`. `part`: its number, from 0."""

    sequence: int
    part: int
    parts: int
    hashes: tuple[bytes, ...]


class Wrong(StrEnum):
    """Reason why the router's view of a worker's cache must be wrong."""

    GAP = auto()  # a change is missing
    BEHIND = auto()  # announced changes do not arrive
    SUM = auto()  # the worker's checksum differs
    DRIFT = auto()  # too many prompts found other blocks than predicted


class CacheReplica(ChangeFollower):
    """Router's view of one worker's cache, stored in the index. It exists as long as the worker's process.

    Changes are applied from the first snapshot on. If a change is missing or the worker's checksum differs, another
    snapshot is requested. While changes are not applied, blocks of completed prompts are assumed to be cached.
    """

    def __init__(self, worker: str, index: PrefixIndex) -> None:
        super().__init__()
        self.exact = False  # whether the last comparison with the worker's checksum succeeded
        self.resyncs = 0
        self.wrong: Wrong | None = None  # reason of the last resync; None: there was none
        self.audit = CacheAudit()
        self.evictions = EvictionLog()
        self._worker = worker
        self._index = index
        self._parts: dict[int, tuple[bytes, ...]] = {}
        self._parts_of = (0, 0)  # sequence and number of parts of the incomplete snapshot
        self._assumed: OrderedDict[bytes, None] = OrderedDict()  # blocks added by `assume`, least recently used first

    def connected(self) -> None:
        """Handle a connection of the worker: changes may be lost, so the caller requests a snapshot."""
        self.follows = self.exact = False
        self.asked_s = None

    def disconnected(self) -> None:
        self.follows = self.exact = False

    def take_changes(self, changes: CacheUpdate, now: float) -> bool:
        if self.is_ignored(changes.sequence):
            return False
        if changes.sequence > self.sequence + 1:
            return self.resync(Wrong.GAP, now)
        self._index.evict(self._worker, changes.evicted)
        self._index.store(self._worker, changes.stored)
        self.evictions.add(changes.evicted, now)
        self.applied(changes.sequence)
        return False

    def take_snapshot(self, part: CacheSnapshotPart, now: float) -> None:
        """Store a snapshot's part; the complete snapshot replaces the worker's blocks. Outdated parts are ignored."""
        if self.follows and part.sequence < self.sequence:
            return
        if self._parts_of != (part.sequence, part.parts):
            self._parts, self._parts_of = {}, (part.sequence, part.parts)
        self._parts[part.part] = part.hashes
        if len(self._parts) < part.parts:
            return
        gone = self._index.replace(self._worker, (each for hashes in self._parts.values() for each in hashes))
        self.evictions.begin(now)
        self.evictions.add(gone - self._assumed.keys(), now)  # evicted while changes were not applied
        self._parts, self._parts_of = {}, (0, 0)
        self._assumed.clear()
        self.follows = True
        self.applied(part.sequence)

    def check(self, reported: CacheSum | None, now: float) -> bool:
        """Compare the view with the checksum in a worker's report. `reported` None: the worker reports no changes."""
        if self.follows and self.audit.wants_resync(now):
            return self.resync(Wrong.DRIFT, now)
        if reported is None:
            return False
        if not self.follows:
            if self.asked_s is None:
                self.asked_s = now  # the snapshot was requested when the worker connected
            return self.restart(now)
        if reported.sequence > self.sequence:
            return self.is_behind(reported.sequence, now) and self.resync(Wrong.BEHIND, now)
        if reported.sequence == self.sequence:
            index, worker = self._index, self._worker
            self.exact = reported.digest == index.digest(worker) and reported.blocks == index.blocks(worker)
            return not self.exact and self.resync(Wrong.SUM, now)
        return False

    def resync(self, wrong: Wrong, now: float) -> bool:
        """Ignore changes until the next snapshot, because the view is wrong. Return whether to request the snapshot."""
        self.exact = False
        self.wrong = wrong
        self.resyncs += 1
        return self.restart(now)

    def assume(self, block_hashes: Sequence[bytes], capacity_blocks: int) -> None:
        """Assume that the worker has cached these blocks of a completed prompt; ignored while changes are applied.

        `capacity_blocks`: blocks that fit in the worker's KV pool.
        """
        if self.follows:
            return
        for block_hash in reversed(block_hashes):  # a prompt's last blocks are evicted first, so they become the oldest
            self._assumed[block_hash] = None
            self._assumed.move_to_end(block_hash)
        self._index.store(self._worker, block_hashes)
        while len(self._assumed) > capacity_blocks:
            self._index.evict(self._worker, (self._assumed.popitem(last=False)[0],))


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """State of the router's view of a worker's cache, as operators see it."""

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
    """Router's views of all workers' prefix caches, and the index of their blocks."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self._caches: dict[str, CacheReplica] = {}
        self._salted = SaltedNames()

    def connected(self, worker: str) -> None:
        """Begin or resume the view of a connected worker. The caller requests a snapshot from it."""
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

    def take_changes(self, worker: str, changes: CacheUpdate, now: float) -> bool:
        cache = self._caches.get(worker)
        return cache is not None and cache.take_changes(changes, now)

    def take_snapshot(self, worker: str, part: CacheSnapshotPart, now: float) -> None:
        cache = self._caches.get(worker)
        if cache is not None:
            cache.take_snapshot(part, now)

    def check(self, worker: str, reported: CacheSum | None, now: float) -> bool:
        """Compare the view with the checksum in a worker's report. Return whether to request a snapshot."""
        cache = self._caches.get(worker)
        return cache is not None and cache.check(reported, now)

    def wrong(self, worker: str) -> Wrong | None:
        """Return the reason of the last resync of the worker's view; None: there was no resync."""
        cache = self._caches.get(worker)
        return None if cache is None else cache.wrong

    def follows(self, worker: str) -> bool:
        """Return whether the worker's changes are applied; if not, call `assume` for its completed prompts."""
        cache = self._caches.get(worker)
        return cache is not None and cache.follows

    def assume(self, worker: str, block_hashes: Sequence[bytes], capacity_blocks: int) -> None:
        cache = self._caches.get(worker)
        if cache is not None:
            cache.assume(block_hashes, capacity_blocks)

    def audit(self, worker: str, predicted_tokens: int, actual_tokens: int) -> None:
        """Record the predicted and actual prefix-cache hit of a prompt on the worker, in tokens."""
        cache = self._caches.get(worker)
        if cache is not None:
            cache.audit.take(predicted_tokens, actual_tokens)

    def look(self, worker: str, block_hashes: Sequence[bytes], hit_blocks: int, now: float) -> CacheLook:
        """Return a snapshot of the worker's cache for a prompt. `hit_blocks`: blocks cached or expected there."""
        cache = self._caches.get(worker)
        if cache is None:
            return CacheLook(hit_blocks, follows=False, known_s=0.0)
        evictions = cache.evictions
        evicted = evictions.runs(block_hashes, hit_blocks, now)
        return CacheLook(hit_blocks, cache.follows, evictions.known_s(now), evicted)

    def under_other_salt(self, block_hashes: Sequence[bytes], plain_hashes: Sequence[bytes], worker: str) -> Held:
        """Return the prefix of a prompt that is cached under another salt or without one, preferably on `worker`.

        `plain_hashes`: hashes of the prompt's first blocks without a salt; equal to `block_hashes` without a salt.
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
        """Record a completed prompt with a salt. `plain_hashes`: hashes that its blocks would have without the salt."""
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
        """Divide the maximum number of recorded evictions among the workers."""
        most = min(KEPT_EVICTIONS, MOST_EVICTIONS // max(1, len(self._caches)))
        for cache in self._caches.values():
            cache.evictions.most = most
