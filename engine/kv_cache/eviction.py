"""Eviction order of cached blocks: finished sessions first, then unprotected blocks by last use, then the session whose
next turn is farthest away. Pure.

Only leaves are evicted: blocks that no other cached block continues. So every remaining block keeps its prefix.
Without sessions this is plain LRU over leaves.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from baton.engine.kv_cache.sessions import DueSession, RetentionState, SessionRetention, Sessions


@dataclass(slots=True)
class Evictions:
    """Numbers of evicted blocks since the start."""

    done: int = 0  # blocks of finished sessions
    others: int = 0  # unprotected blocks
    protected: int = 0  # blocks of sessions with an expected next turn


HALF_LIFE_BLOCKS = 2048  # after this many prefetched blocks, older counts weigh half
MIN_BLOCKS = 256  # minimum number of used or evicted prefetched blocks before prefetching may be reduced
MIN_USED_SHARE = 0.5  # below this share of used prefetched blocks, only few sessions are prefetched
RETRY_EVERY = 8  # one in this many sessions is prefetched while prefetching is reduced


@dataclass(slots=True)
class Prefetches:
    """Blocks restored before a request asked for them.

    If most are evicted unused, because the pool is small or busy, only few sessions are prefetched.
    """

    blocks: int = 0  # prefetched since the start
    used: int = 0  # prefetched blocks that a request has used, since the start
    waiting: set[int] = field(default_factory=set)  # prefetched blocks in the cache that no request has used
    _used_lately: float = 0.0
    _lost_lately: float = 0.0
    _skipped: int = 0

    def on_used(self, block: int) -> None:
        if block in self.waiting:
            self.waiting.discard(block)
            self.used += 1
            self._used_lately += 1.0
            self._forget()

    def on_evicted(self, block: int) -> None:
        if block in self.waiting:
            self.waiting.discard(block)
            self._lost_lately += 1.0
            self._forget()

    def worth_loading(self, due: Sequence[DueSession]) -> list[DueSession]:
        """Return the due sessions to prefetch: all, or a sample if most prefetched blocks were evicted unused."""
        known = self._used_lately + self._lost_lately
        if known < MIN_BLOCKS or self._used_lately >= MIN_USED_SHARE * known:
            return list(due)
        numbered = enumerate(due, start=self._skipped)
        self._skipped += len(due)
        return [session for number, session in numbered if number % RETRY_EVERY == RETRY_EVERY - 1]

    def _forget(self) -> None:
        if self._used_lately + self._lost_lately >= HALF_LIFE_BLOCKS:
            self._used_lately /= 2
            self._lost_lately /= 2


@dataclass(frozen=True, slots=True)
class SessionCounts:
    """Counters of a pool's sessions and evictions."""

    known: int = 0
    protected_blocks: int = 0
    evicted_done_blocks: int = 0
    evicted_other_blocks: int = 0
    evicted_protected_blocks: int = 0
    prefetched_blocks: int = 0
    prefetched_used_blocks: int = 0


LeafEntries = list[tuple[int, int]]
"""Heap of (last use, block): every leaf of one class, and outdated entries."""


class EvictionOrder:
    """Cached blocks in eviction order: by class, then by last use.

    `is_leaf` and `is_watched` return the current state of a block. Watched blocks, and blocks loaded for a prompt that
    has not started, are evicted last.
    """

    def __init__(self, total_blocks: int, is_leaf: Callable[[int], bool], is_watched: Callable[[int], bool]) -> None:
        self.sessions = Sessions(total_blocks, self._on_end)
        self.evictions = Evictions()
        self.prefetches = Prefetches()
        self._is_leaf = is_leaf
        self._is_watched = is_watched
        self.used: dict[int, int] = {}
        """Last use of each cached block, by a counter that grows with every use. Read-only."""
        self._keeps: dict[int, SessionRetention] = {}  # retention by block, of all cached or held blocks of sessions
        self._now = 0
        self._done: LeafEntries = []
        self._others: LeafEntries = []
        self._protected: dict[SessionRetention, LeafEntries] = {}
        self._loaded: set[int] = set()  # blocks of the newest load, whose prompt has not started

    def __contains__(self, block: int) -> bool:
        return block in self.used

    def __iter__(self) -> Iterator[int]:
        return iter(self.used)

    def __delitem__(self, block: int) -> None:
        """Remove a block that is used again or lost its hash. Raises: KeyError."""
        del self.used[block]
        self._loaded.discard(block)
        if self._keeps:
            self.sessions.count(self._keeps.get(block), -1)
        if self.prefetches.waiting:
            self.prefetches.on_used(block)

    def add(self, block: int, is_leaf: bool, keep: SessionRetention | None = None) -> None:
        """Add a block as most recently used. Without `keep`, a session that protects the block still protects it."""
        if keep is not None or self._keeps:
            self._give(block, keep)
        self._now = self.used[block] = self._now + 1
        if is_leaf:
            self._push(self._entries(block), self._now, block)

    def touch(self, block: int) -> None:
        """Mark a block as most recently used."""
        self._now = self.used[block] = self._now + 1
        if self._is_leaf(block):
            self._push(self._entries(block), self._now, block)

    def forget(self, block: int) -> None:
        """Drop the retention of a block that lost its hash."""
        self._keeps.pop(block, None)

    def on_leaf(self, block: int) -> None:
        """Make a block evictable: no cached block continues it any more."""
        used = self.used.get(block)
        if used is not None:
            self._push(self._entries(block), used, block)

    def take(self) -> int | None:
        """Choose the block to evict, which the caller deletes; None if no cached block is a leaf."""
        for spares_watched in (True, False):
            if self._done and (block := self._first(self._done, spares_watched)) is not None:
                self.evictions.done += 1
            elif (block := self._first(self._others, spares_watched)) is not None:
                self.evictions.others += 1
            elif (block := self._farthest(spares_watched)) is not None:
                self.evictions.protected += 1
            if block is not None:
                self.prefetches.on_evicted(block)
                self._loaded.discard(block)
                return block
        return None

    def loaded(self, blocks: Iterable[int]) -> None:
        """Evict these blocks last until the prompt that they were loaded for uses them, or other blocks are loaded."""
        self._loaded = {block for block in blocks if block in self.used}

    def prefetched(self, blocks: Iterable[int]) -> None:
        """Record blocks that were prefetched into the cache, without a request."""
        before = len(self.prefetches.waiting)
        self.prefetches.waiting.update(block for block in blocks if block in self.used)
        self.prefetches.blocks += len(self.prefetches.waiting) - before

    def due(self, until_s: float, most: int) -> list[DueSession]:
        """Return at most `most` sessions to prefetch that are expected by `until_s`."""
        return self.prefetches.worth_loading(self.sessions.due(until_s, most))

    @property
    def counts(self) -> SessionCounts:
        sessions, evictions = self.sessions, self.evictions
        return SessionCounts(
            known=sessions.known,
            protected_blocks=sessions.protected_blocks,
            evicted_done_blocks=evictions.done,
            evicted_other_blocks=evictions.others,
            evicted_protected_blocks=evictions.protected,
            prefetched_blocks=self.prefetches.blocks,
            prefetched_used_blocks=self.prefetches.used,
        )

    @property
    def awaited_blocks(self) -> int:
        """Number of cached blocks that a session protects or a prompt will use."""
        return self.sessions.protected_blocks + len(self._loaded)

    @property
    def oldest(self) -> int:
        """Return the least recently used block, leaf or not. Walks all blocks. Raises: ValueError if there is none."""
        return min(self.used, key=self.used.__getitem__)

    def check(self) -> None:
        """Assert that every leaf is in the heap of its class, and check the sessions' sums. Walks all blocks."""
        self.sessions.check()
        for block, used in self.used.items():
            assert not self._is_leaf(block) or (used, block) in self._entries(block), "a leaf cannot be found"
        protected = [keep for block in self.used if (keep := self._keeps.get(block)) is not None]
        count = sum(keep.state is RetentionState.PROTECTED for keep in protected)
        assert count == self.sessions.protected_blocks, "protected blocks are wrong"

    def _give(self, block: int, keep: SessionRetention | None) -> None:
        before = self._keeps.get(block)
        is_protected = before is not None and before.state is RetentionState.PROTECTED
        if is_protected and (keep is None or keep.state is not RetentionState.PROTECTED):
            keep = before
        if keep is not None:
            self._keeps[block] = keep
        elif before is not None:
            del self._keeps[block]
        self.sessions.count(keep, 1)

    def _push(self, entries: LeafEntries, used: int, block: int) -> None:
        if len(entries) > 2 * len(self.used) + 64:  # remove outdated entries: every use of a leaf leaves one
            entries[:] = sorted({entry for entry in entries if self._is_current(entries, *entry)})
        heapq.heappush(entries, (used, block))

    def _is_current(self, entries: LeafEntries, used: int, block: int) -> bool:
        return self.used.get(block) == used and self._entries(block) is entries

    def _entries(self, block: int) -> LeafEntries:
        """Return the heap of the block's class."""
        keep = self._keeps.get(block) if self._keeps else None
        if keep is None or keep.state is RetentionState.OTHER:
            return self._others
        return self._done if keep.state is RetentionState.DONE else self._protected.setdefault(keep, [])

    def _farthest(self, spares_watched: bool) -> int | None:
        if not self._protected:
            return None
        with closing(self.sessions.farthest.in_order()) as keeps:
            found = (self._first(self._protected.get(keep, []), spares_watched) for keep in keeps)
            return next((block for block in found if block is not None), None)

    def _first(self, entries: LeafEntries, spares_watched: bool) -> int | None:
        watched: LeafEntries = []
        found: int | None = None
        while entries and found is None:
            used, block = heapq.heappop(entries)
            if self.used.get(block) != used or not self._is_leaf(block):
                continue  # outdated entry, or no leaf: a block is pushed again when it becomes a leaf
            if self._keeps and self._entries(block) is not entries:
                continue
            if spares_watched and (block in self._loaded or self._is_watched(block)):
                watched.append((used, block))
            else:
                found = block
        for entry in watched:
            heapq.heappush(entries, entry)
        return found

    def _on_end(self, keep: SessionRetention) -> None:
        """Move a finished retention's leaves to the heap of its new class.

        The retention's other blocks enter that heap when they become leaves.
        """
        leaves = self._protected.pop(keep, [])
        into = self._done if keep.state is RetentionState.DONE else self._others
        for used, block in leaves:
            if self.used.get(block) == used and self._keeps.get(block) is keep:
                heapq.heappush(into, (used, block))
