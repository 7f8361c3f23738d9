"""Sessions of a pool: when the next turn of each is expected, and which blocks are protected until then. Pure.

`now` is monotonic seconds. After a turn a session pauses, then returns with its whole conversation. While a return is
likely, the session's blocks are protected: others are evicted first. Protected blocks are limited per owner, so that
one owner cannot evict all others' sessions.
"""

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from enum import Enum

MAX_SESSIONS = 16_384
NAMED_POOLS = 4
"""Maximum number of remembered block hashes, in multiples of the pool's blocks. Those of the oldest turn go first."""
MIN_PAUSE_S = 0.05  # an earlier arrival is a retry of the same turn
INITIAL_PAUSE_S = 5.0  # expected pause before any is measured
INITIAL_PATIENCE_S = 300.0  # longest wait for a next turn until MIN_PAUSES are measured
MIN_PAUSES = 8  # measured pauses before their distribution is used
MIN_PATIENCE_RATIO = 4.0  # minimum ratio of the longest wait for a next turn to its expected pause
PATIENCE_QUANTILE = 0.95  # longest wait for a next turn, as a quantile of all pauses
PAUSE_EWMA_WEIGHT = 0.3  # weight of the newest pause in a session's mean
DECAY = 0.999  # factor by which each later pause, of any session, reduces the weight of a pause
DOUBLE_COST_BLOCKS = 2048
"""Depth in blocks at which computing a block costs twice as much as the first: attention reads all before it."""


class RetentionState(Enum):
    PROTECTED = "protected"  # a next turn is expected
    OTHER = "other"  # evicted like blocks without a session
    DONE = "done"  # no next turn will come: evicted first


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """Session fields of a request."""

    session_id: bytes
    owner: bytes  # API key or cache salt
    arrived_s: float
    keep_for_s: float | None = None  # protection after the turn's end; None: while a next turn is likely
    done: bool = False  # whether this is the session's last turn


@dataclass(eq=False, slots=True)
class SessionRetention:
    """Retention of a session's blocks between turns. A state other than PROTECTED is final."""

    session_id: bytes
    owner: bytes
    state: RetentionState = RetentionState.PROTECTED
    blocks: int = 0  # blocks of the last turn, including those shared with other sessions
    cached_blocks: int = 0  # blocks of the session that are in the cache now
    ended_s: float = 0.0  # end of the last turn
    due_s: float = math.inf  # expected next turn; the later, the sooner its blocks are evicted
    lapse_s: float = math.inf  # end of the protection
    wake_s: float = math.inf  # next time to check due_s and lapse_s; inf during a turn


@dataclass(frozen=True, slots=True)
class KeptBlocks:
    """Blocks of one session that a leaving worker may hand over."""

    session_id: bytes
    owner: bytes
    names: tuple[bytes, ...]
    left_s: float  # seconds of protection left


@dataclass(frozen=True, slots=True)
class DueSession:
    """Session with an expected next turn, and the hashes of the blocks that its last turn left."""

    session_id: bytes
    names: tuple[bytes, ...]


@dataclass(eq=False, slots=True)
class Session:
    keep: SessionRetention | None = None
    ended_s: float | None = None  # end of the last turn; None during a turn and before the first has ended
    pauses: int = 0
    usual_pause_s: float = 0.0  # geometric mean, which a few long pauses change little
    due_s: float = math.inf  # expected next turn


class Pauses:
    """Histogram of the pauses between turns, with decay. Buckets are powers of two, from 1/16 s to 36 hours."""

    FIRST = -4
    BUCKETS = 22

    def __init__(self) -> None:
        self._counts = [0.0] * self.BUCKETS
        self.observed = 0

    def observe(self, pause_s: float) -> None:
        bucket = math.frexp(max(pause_s, 2.0**self.FIRST))[1] - 1 - self.FIRST
        self._counts = [count * DECAY for count in self._counts]
        self._counts[min(bucket, self.BUCKETS - 1)] += 1.0
        self.observed += 1

    def quantile_s(self, share: float) -> float:
        """Return the upper bound of the bucket that contains the quantile `share` of all pauses; 0 without pauses."""
        left = share * sum(self._counts)
        for bucket, count in enumerate(self._counts):
            left -= count
            if count and left <= 1e-9:
                return float(2.0 ** (self.FIRST + bucket + 1))
        return 0.0


@dataclass(slots=True)
class FarthestFirst:
    """Heap of protected retentions, the latest due first. Outdated entries are dropped when reached."""

    entries: list[tuple[float, int, SessionRetention]] = field(default_factory=list)
    keeps: set[SessionRetention] = field(default_factory=set)

    def put(self, keep: SessionRetention, number: int) -> None:
        self.keeps.add(keep)
        if len(self.entries) > 2 * len(self.keeps) + 64:
            self.entries = [entry for entry in self.entries if self._is_valid(entry)]
            heapq.heapify(self.entries)
        heapq.heappush(self.entries, (-keep.due_s, number, keep))

    def first(self) -> SessionRetention | None:
        while self.entries:
            if self._is_valid(self.entries[0]):
                return self.entries[0][2]
            heapq.heappop(self.entries)
        return None

    def in_order(self) -> Generator[SessionRetention, None, None]:
        """Iterate over all retentions. Close the generator before changing any of them."""
        seen: dict[SessionRetention, tuple[float, int, SessionRetention]] = {}
        try:
            while (keep := self.first()) is not None:
                entry = heapq.heappop(self.entries)
                if keep not in seen:
                    seen[keep] = entry
                    yield keep
        finally:
            for entry in seen.values():
                heapq.heappush(self.entries, entry)

    def _is_valid(self, entry: tuple[float, int, SessionRetention]) -> bool:
        return entry[2] in self.keeps and -entry[0] == entry[2].due_s


@dataclass(slots=True)
class Owner:
    blocks: int = 0  # blocks of the owner's protected sessions
    farthest: FarthestFirst = field(default_factory=FarthestFirst)


class Sessions:
    """Sessions of one pool. `on_end` is called with a retention that is no longer protected."""

    def __init__(self, total_blocks: int, on_end: Callable[[SessionRetention], None], most: int = MAX_SESSIONS) -> None:
        self._total_blocks = total_blocks
        self._on_end = on_end
        self._most = most
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()  # least recently used first
        self._owners: dict[bytes, Owner] = {}  # owners of at least one protected session
        self.wakes: list[tuple[float, int, SessionRetention]] = []
        """Heap of the times at which `advance` checks a retention; empty without sessions."""
        self._names: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()  # block hashes by session id, oldest first
        self._named_blocks = 0
        self._dues: list[tuple[float, int, bytes]] = []  # expected next turns of sessions whose blocks may be in files
        self._numbers = itertools.count()
        self.farthest = FarthestFirst()
        self.pauses = Pauses()
        self.now = 0.0
        self.protected_blocks = 0  # protected blocks in the cache
        self.file_price: float | None = None
        """Cost of loading a block from files, relative to computing the first block of a prompt; None without files."""

    @property
    def known(self) -> int:
        return len(self._sessions)

    def advance(self, now: float) -> None:
        """Advance the clock and update overdue sessions."""
        self.now = max(self.now, now)
        while self.wakes and self.wakes[0][0] <= self.now:
            wake_s, _, keep = heapq.heappop(self.wakes)
            if keep.state is not RetentionState.PROTECTED or wake_s != keep.wake_s:
                continue
            if self.now >= keep.lapse_s:
                self._end(keep, RetentionState.OTHER)
            else:  # the longer a turn is overdue, the later it is expected
                self._expect(keep, keep.ended_s + 2.0 * max(self.now - keep.ended_s, MIN_PAUSE_S))

    def begin(self, turn: SessionTurn) -> Session:
        """Record the arrival of a turn, also of a retry."""
        self.advance(turn.arrived_s)
        session = self._sessions.get(turn.session_id)
        if session is None:
            session = self._sessions[turn.session_id] = Session()
            if len(self._sessions) > self._most:
                self._forget(*self._sessions.popitem(last=False))
        else:
            self._sessions.move_to_end(turn.session_id)
        if session.ended_s is not None:
            pause_s, session.ended_s = turn.arrived_s - session.ended_s, None
            if pause_s >= MIN_PAUSE_S:
                self._observe(session, pause_s)
        if session.keep is not None and session.keep.state is RetentionState.PROTECTED:
            session.keep.lapse_s = session.keep.wake_s = math.inf
            session.keep.due_s = self.now
            self._put(session.keep)
        return session

    def end(self, session: Session, turn: SessionTurn, blocks: int | None, names: Sequence[bytes] = ()) -> None:
        """Record the end of a turn.

        `blocks`: number of blocks of prompt and answer, which the caller releases next; None if the turn had none.
        `names`: hashes of the first of these blocks.
        """
        session.ended_s = self.now
        keep = session.keep
        if turn.done or turn.keep_for_s == 0.0:
            self._name(turn.session_id, ())
            state = RetentionState.DONE if turn.done else RetentionState.OTHER
            if keep is not None and keep.state is RetentionState.PROTECTED:
                self._end(keep, state)
            else:
                session.keep = SessionRetention(turn.session_id, turn.owner, state)
            return
        if keep is None or keep.state is not RetentionState.PROTECTED:
            keep = session.keep = SessionRetention(turn.session_id, turn.owner)
        owner = self._owners.get(keep.owner)
        if owner is None:
            owner = self._owners[keep.owner] = Owner()
            self._bound_all()
        if blocks is None:
            blocks = keep.blocks
        else:
            self._name(turn.session_id, tuple(names))
        owner.blocks += blocks - keep.blocks
        keep.blocks, keep.ended_s = blocks, self.now
        expected_s = self.expected_s(session)
        if turn.keep_for_s is None:
            keep.lapse_s = self.now + self.patience_s(expected_s)
        else:
            expected_s = min(expected_s, turn.keep_for_s)
            keep.lapse_s = self.now + turn.keep_for_s
        self._expect(keep, self.now + expected_s)
        session.due_s = self.now + expected_s
        if self.file_price is not None:
            heapq.heappush(self._dues, (session.due_s, next(self._numbers), turn.session_id))
        self._bound(owner)

    def take_over(self, turn: SessionTurn, names: Sequence[bytes]) -> SessionRetention | None:
        """Record a session received from another pool as if its last turn had just finished here."""
        session = self._sessions.get(turn.session_id)
        if session is not None:
            if session.ended_s is None:
                return session.keep  # its next turn arrived in the meantime
            session.ended_s = None  # its last turn was in another pool: no pause is measured
        session = self.begin(turn)
        self.end(session, turn, len(names), names)
        return session.keep

    def kept(self) -> list[KeptBlocks]:
        """Return the protected blocks of paused sessions, the soonest due first."""
        between = [keep for keep in self.farthest.keeps if math.isfinite(keep.wake_s)]
        between.sort(key=lambda keep: (keep.due_s, keep.session_id))
        names = ((keep, self._names.get(keep.session_id, ())) for keep in between)
        return [KeptBlocks(keep.session_id, keep.owner, of, keep.lapse_s - self.now) for keep, of in names if of]

    def due(self, until_s: float, most: int) -> list[DueSession]:
        """Return at most `most` sessions expected by `until_s`, each once per turn."""
        found: list[DueSession] = []
        while self._dues and self._dues[0][0] <= until_s and len(found) < most:
            due_s, _, session_id = heapq.heappop(self._dues)
            session, names = self._sessions.get(session_id), self._names.get(session_id)
            if session is not None and names and session.ended_s is not None and session.due_s == due_s:
                found.append(DueSession(session_id, names))
        return found

    def keep_of(self, session_id: bytes) -> SessionRetention | None:
        session = self._sessions.get(session_id)
        return None if session is None else session.keep

    def expected_s(self, session: Session) -> float:
        """Return the expected next pause of a session."""
        if session.pauses >= 2:
            return session.usual_pause_s
        return self.pauses.quantile_s(0.5) or INITIAL_PAUSE_S

    def patience_s(self, expected_s: float) -> float:
        """Return how many seconds after a turn a session without `keep_for_s` stays protected."""
        late_s = self.pauses.quantile_s(PATIENCE_QUANTILE) if self.pauses.observed >= MIN_PAUSES else INITIAL_PATIENCE_S
        return max(late_s, MIN_PATIENCE_RATIO * expected_s)

    def price(self, blocks: int) -> float:
        """Return the cost of restoring the last of `blocks` blocks, relative to computing a prompt's first block."""
        computed = 1.0 + blocks / DOUBLE_COST_BLOCKS
        return computed if self.file_price is None else max(1e-3, min(computed, self.file_price))

    @property
    def most_protected_blocks(self) -> int:
        """Limit of an owner's protected blocks: half of the pool, a third if two owners have sessions, and so on."""
        return self._total_blocks // (len(self._owners) + 1)

    def count(self, keep: SessionRetention | None, blocks: int) -> None:
        """Add `blocks` to the number of a session's blocks in the cache."""
        if keep is not None:
            keep.cached_blocks += blocks
            if keep.state is RetentionState.PROTECTED:
                self.protected_blocks += blocks

    def check(self) -> None:
        """Assert that sums are right and limits are kept."""
        for owner in self._owners.values():
            keeps = owner.farthest.keeps
            assert keeps, "an owner without a protected session is known"
            assert owner.blocks == sum(keep.blocks for keep in keeps), "an owner's blocks are wrong"
            assert owner.blocks <= self.most_protected_blocks, "an owner has more than its share"
            assert all(keep.state is RetentionState.PROTECTED for keep in keeps), "an ended keep is an owner's"
        protected = {keep for owner in self._owners.values() for keep in owner.farthest.keeps}
        assert protected == self.farthest.keeps, "not every protected keep has an owner"
        assert self.protected_blocks == sum(keep.cached_blocks for keep in protected), "protected blocks are wrong"
        assert len(self._sessions) <= self._most, "too many sessions are known"
        assert self._named_blocks == sum(map(len, self._names.values())), "named blocks are wrong"
        assert self._named_blocks <= NAMED_POOLS * self._total_blocks, "too many names are remembered"

    def _observe(self, session: Session, pause_s: float) -> None:
        self.pauses.observe(pause_s)
        before_s = session.usual_pause_s if session.pauses else pause_s
        session.usual_pause_s = before_s * (pause_s / before_s) ** PAUSE_EWMA_WEIGHT
        session.pauses += 1

    def _expect(self, keep: SessionRetention, due_s: float) -> None:
        """Set the expected time of the next turn: `due_s`, delayed if the session's blocks are cheap to restore."""
        keep.wake_s = min(due_s, keep.lapse_s)
        keep.due_s = self.now + max(0.0, due_s - self.now) / self.price(keep.blocks)
        heapq.heappush(self.wakes, (keep.wake_s, next(self._numbers), keep))
        self._put(keep)

    def _put(self, keep: SessionRetention) -> None:
        number = next(self._numbers)
        self.farthest.put(keep, number)
        self._owners[keep.owner].farthest.put(keep, number)

    def _bound(self, owner: Owner) -> None:
        """Unprotect the sessions due last until the owner is within its limit."""
        while owner.blocks > self.most_protected_blocks and (keep := owner.farthest.first()) is not None:
            self._end(keep, RetentionState.OTHER)

    def _bound_all(self) -> None:
        """Unprotect sessions of every owner above its limit. Call it after adding an owner, which lowers the limits."""
        for owner in tuple(self._owners.values()):
            self._bound(owner)

    def _end(self, keep: SessionRetention, state: RetentionState) -> None:
        owner = self._owners[keep.owner]
        owner.blocks -= keep.blocks
        owner.farthest.keeps.discard(keep)
        self.farthest.keeps.discard(keep)
        if not owner.farthest.keeps:
            del self._owners[keep.owner]
        self.protected_blocks -= keep.cached_blocks
        keep.state = state
        self._on_end(keep)

    def _name(self, session_id: bytes, names: tuple[bytes, ...]) -> None:
        """Remember the block hashes that a session's last turn left."""
        self._named_blocks += len(names) - len(self._names.pop(session_id, ()))
        if names:
            self._names[session_id] = names
        while self._named_blocks > NAMED_POOLS * self._total_blocks:
            self._named_blocks -= len(self._names.popitem(last=False)[1])

    def _forget(self, session_id: bytes, session: Session) -> None:
        self._name(session_id, ())
        keep = session.keep
        if keep is not None and keep.state is RetentionState.PROTECTED:
            self._end(keep, RetentionState.OTHER)
