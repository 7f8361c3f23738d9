"""Which cached block goes first: of sessions that are done, then the least recently used of the unprotected ones, then
of the session whose next turn is farthest. Pure.

Only leaves are chosen: blocks that no other block continues. So all blocks of the prefix of one that stays, stay. Where
no request has a session, that is the least recently used leaf.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from baton.engine.kv_cache.sessions import DueSession, RetentionState, SessionRetention, Sessions


@dataclass(slots=True)
class Evictions:
    """Blocks, since the start."""

    done: int = 0  # of sessions that were done
    others: int = 0  # that no session protected
    protected: int = 0  # of sessions whose next turn was expected


HALF_LIFE_BLOCKS = 2048  # after so many more, those that were used or lost before count half
MIN_BLOCKS = 256  # before it is known whether loading ahead is of use
MIN_USED_SHARE = 0.5  # of the blocks that were loaded ahead lately, so that all sessions are
RETRY_EVERY = 8  # else one of so many is


@dataclass(slots=True)
class Prefetches:
    """Blocks that were restored before anyone asked for them. Where the pool is so small, or so busy, that most are
    evicted before their turn comes, loading them was for nothing: then few sessions are loaded ahead.
    """

    blocks: int = 0  # since the start
    used: int = 0  # of those, by a request
    waiting: set[int] = field(default_factory=set)  # those in the cache that no request has used yet
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
        """Of sessions that are due: all, or as few as will show when it is of use again."""
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
    """A picture of the sessions of a pool, and of all that it evicted."""

    known: int = 0
    protected_blocks: int = 0
    evicted_done_blocks: int = 0
    evicted_other_blocks: int = 0
    evicted_protected_blocks: int = 0
    prefetched_blocks: int = 0
    prefetched_used_blocks: int = 0


LeafEntries = list[tuple[int, int]]
"""A heap of (moment of use, block): every leaf of its class is in it, and entries that are out of date."""


class EvictionOrder:
    """The cached blocks. `is_leaf`, `is_watched`: of a block, at the time of the call; watched ones go last.

    So do those that were loaded for a prompt, until it has begun.
    """

    def __init__(self, total_blocks: int, is_leaf: Callable[[int], bool], is_watched: Callable[[int], bool]) -> None:
        self.sessions = Sessions(total_blocks, self._on_end)
        self.evictions = Evictions()
        self.prefetches = Prefetches()
        self._is_leaf = is_leaf
        self._is_watched = is_watched
        self.used: dict[int, int] = {}
        """When each cached block was used last, by a count that grows with every use. To be read."""
        self._keeps: dict[int, SessionRetention] = {}  # whose a block with a name is, cached or held; those of sessions
        self._now = 0
        self._done: LeafEntries = []
        self._others: LeafEntries = []
        self._protected: dict[SessionRetention, LeafEntries] = {}
        self._loaded: set[int] = set()  # by the newest load for a prompt, which has not used them yet

    def __contains__(self, block: int) -> bool:
        return block in self.used

    def __iter__(self) -> Iterator[int]:
        return iter(self.used)

    def __delitem__(self, block: int) -> None:
        """It is used again, or has lost its name. Raises: KeyError."""
        del self.used[block]
        self._loaded.discard(block)
        if self._keeps:
            self.sessions.count(self._keeps.get(block), -1)
        if self.prefetches.waiting:
            self.prefetches.on_used(block)

    def add(self, block: int, is_leaf: bool, keep: SessionRetention | None = None) -> None:
        """It was used last, by a turn of this session. Else it stays with the session that protects it."""
        if keep is not None or self._keeps:
            self._give(block, keep)
        self._now = self.used[block] = self._now + 1
        if is_leaf:
            self._push(self._entries(block), self._now, block)

    def touch(self, block: int) -> None:
        """It is the most recently used one."""
        self._now = self.used[block] = self._now + 1
        if self._is_leaf(block):
            self._push(self._entries(block), self._now, block)

    def forget(self, block: int) -> None:
        """It has lost its name, and is not cached any more."""
        self._keeps.pop(block, None)

    def on_leaf(self, block: int) -> None:
        """No other block continues it any more."""
        used = self.used.get(block)
        if used is not None:
            self._push(self._entries(block), used, block)

    def take(self) -> int | None:
        """The block to evict now, which its caller deletes; None where every cached block has one that continues it."""
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
        """A prompt that is about to be queued needs them: they go last until they are used, or more are loaded."""
        self._loaded = {block for block in blocks if block in self.used}

    def prefetched(self, blocks: Iterable[int]) -> None:
        """They are in the cache from now on, and no request has asked for them."""
        before = len(self.prefetches.waiting)
        self.prefetches.waiting.update(block for block in blocks if block in self.used)
        self.prefetches.blocks += len(self.prefetches.waiting) - before

    def due(self, until_s: float, most: int) -> list[DueSession]:
        """Sessions to load ahead, of at most so many that are expected by then."""
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
        """Cached ones that a session protects or that a prompt is about to use."""
        return self.sessions.protected_blocks + len(self._loaded)

    @property
    def oldest(self) -> int:
        """The least recently used block, leaf or not. Walks all of them. Raises: ValueError where there is none."""
        return min(self.used, key=self.used.__getitem__)

    def check(self) -> None:
        """Asserts that every leaf can be found in its class, and sums of the sessions. Walks all blocks."""
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
        if len(entries) > 2 * len(self.used) + 64:  # blocks that are used often leave many that are out of date
            entries[:] = sorted({entry for entry in entries if self._is_current(entries, *entry)})
        heapq.heappush(entries, (used, block))

    def _is_current(self, entries: LeafEntries, used: int, block: int) -> bool:
        return self.used.get(block) == used and self._entries(block) is entries

    def _entries(self, block: int) -> LeafEntries:
        """Of the block's class."""
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
                continue  # it comes back as soon as it is a leaf
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
        """Its leaves, of which it has few, join those of its new class; other blocks follow when they are leaves."""
        leaves = self._protected.pop(keep, [])
        into = self._done if keep.state is RetentionState.DONE else self._others
        for used, block in leaves:
            if self.used.get(block) == used and self._keeps.get(block) is keep:
                heapq.heappush(into, (used, block))
