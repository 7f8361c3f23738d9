"""Sessions of a pool: when the next turn of each is expected, and whose blocks are protected until then.

Pure: `now` is monotonic seconds. A session ends a turn, pauses, and comes back with its whole conversation. While its
return is likely its blocks are protected: others go first. An owner's protected blocks are bounded, so that no
owner's sessions push out all others.
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
"""Names of so many times the pool's blocks are remembered of sessions; of the longest ended they go first."""
MIN_PAUSE_S = 0.05  # what comes back sooner is another attempt of the same turn
INITIAL_PAUSE_S = 5.0  # before anything was measured
INITIAL_PATIENCE_S = 300.0  # the same: how long a session is waited for
MIN_PAUSES = 8  # before the pauses of all sessions say how long
MIN_PATIENCE_RATIO = 4.0  # times the expected pause: at least so long a session is waited for
PATIENCE_QUANTILE = 0.95  # of all pauses are shorter than one is waited for
PAUSE_EWMA_WEIGHT = 0.3  # of the newest pause in a session's usual one
DECAY = 0.999  # of a pause against the next one, of whatever session
DOUBLE_COST_BLOCKS = 2048
"""Blocks after which one costs twice as much to compute as the first: attention looks back on all before it."""


class RetentionState(Enum):
    PROTECTED = "protected"  # a next turn is expected
    OTHER = "other"  # as blocks of no session
    DONE = "done"  # there will be no next turn: goes first


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """What a request says of the session that it is a turn of."""

    session_id: bytes
    owner: bytes  # whose it is: an API key, or a salt
    arrived_s: float
    keep_for_s: float | None = None  # after its end; None: as long as a next turn is likely
    done: bool = False  # there will be no other


@dataclass(eq=False, slots=True)
class SessionRetention:
    """The blocks that a session leaves between turns. Its standing leaves PROTECTED once, and never comes back."""

    session_id: bytes
    owner: bytes
    state: RetentionState = RetentionState.PROTECTED
    blocks: int = 0  # of its last turn, those shared with other sessions included
    cached_blocks: int = 0  # those in the cache now
    ended_s: float = 0.0  # its last turn
    due_s: float = math.inf  # when the next is expected; the later, the sooner its blocks go
    lapse_s: float = math.inf  # it is not waited for any longer
    wake_s: float = math.inf  # when one of these is to be looked at again; inf during a turn


@dataclass(frozen=True, slots=True)
class KeptBlocks:
    """What a worker that leaves could hand over of one session."""

    session_id: bytes
    owner: bytes
    names: tuple[bytes, ...]
    left_s: float  # of its protection


@dataclass(frozen=True, slots=True)
class DueSession:
    """A session whose next turn is expected soon, and the names of the blocks that its last one left."""

    session_id: bytes
    names: tuple[bytes, ...]


@dataclass(eq=False, slots=True)
class Session:
    keep: SessionRetention | None = None
    ended_s: float | None = None  # its last turn; None: one runs, or none has ended yet
    pauses: int = 0
    usual_pause_s: float = 0.0  # their geometric mean: a few pauses of minutes say little of the next one
    due_s: float = math.inf  # its next turn


class Pauses:
    """A histogram of pauses by powers of two, from 1/16 s to 36 hours, in which old ones fade."""

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
        """So many of all pauses are no longer: the upper end of a power of two; 0 without any."""
        left = share * sum(self._counts)
        for bucket, count in enumerate(self._counts):
            left -= count
            if count and left <= 1e-9:
                return float(2.0 ** (self.FIRST + bucket + 1))
        return 0.0


@dataclass(slots=True)
class FarthestFirst:
    """Protected keeps, the one that is due last first. Entries that are out of date are dropped when they come up."""

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
        """All of them; it is to be closed, and nothing changed before."""
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
    blocks: int = 0  # of its protected keeps
    farthest: FarthestFirst = field(default_factory=FarthestFirst)


class Sessions:
    """Of one pool. `on_end` is called with a keep that is protected no longer."""

    def __init__(self, total_blocks: int, on_end: Callable[[SessionRetention], None], most: int = MAX_SESSIONS) -> None:
        self._total_blocks = total_blocks
        self._on_end = on_end
        self._most = most
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()  # least recently used first
        self._owners: dict[bytes, Owner] = {}  # those with a protected keep
        self.wakes: list[tuple[float, int, SessionRetention]] = []
        """A heap: when to look at which again, for `advance`. Empty while there are no sessions."""
        self._names: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()  # by session; the longest ended first
        self._named_blocks = 0
        self._dues: list[tuple[float, int, bytes]] = []  # when each session is expected that files may have
        self._numbers = itertools.count()
        self.farthest = FarthestFirst()
        self.pauses = Pauses()
        self.now = 0.0
        self.protected_blocks = 0  # in the cache
        self.file_price: float | None = None
        """Of a block that files have, against computing the first of a prompt; None: there are no files."""

    @property
    def known(self) -> int:
        """How many."""
        return len(self._sessions)

    def advance(self, now: float) -> None:
        """Takes note of the time, and of those that are overdue. Costs nothing while none is."""
        self.now = max(self.now, now)
        while self.wakes and self.wakes[0][0] <= self.now:
            wake_s, _, keep = heapq.heappop(self.wakes)
            if keep.state is not RetentionState.PROTECTED or wake_s != keep.wake_s:
                continue
            if self.now >= keep.lapse_s:
                self._end(keep, RetentionState.OTHER)
            else:  # the longer it is overdue, the longer it will take
                self._expect(keep, keep.ended_s + 2.0 * max(self.now - keep.ended_s, MIN_PAUSE_S))

    def begin(self, turn: SessionTurn) -> Session:
        """A turn has come. To be called again where it is tried again."""
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
        """It has ended, with so many blocks of prompt and answer, which are about to be released; None: it had none.

        `names`: of the first of them.
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
        """What another pool kept for a session is here now, as if its last turn had just ended here."""
        session = self._sessions.get(turn.session_id)
        if session is not None:
            if session.ended_s is None:
                return session.keep  # its next turn has come meanwhile
            session.ended_s = None  # that was not its last turn: no pause
        session = self.begin(turn)
        self.end(session, turn, len(names), names)
        return session.keep

    def kept(self) -> list[KeptBlocks]:
        """What is protected between two turns, the soonest due first."""
        between = [keep for keep in self.farthest.keeps if math.isfinite(keep.wake_s)]
        between.sort(key=lambda keep: (keep.due_s, keep.session_id))
        names = ((keep, self._names.get(keep.session_id, ())) for keep in between)
        return [KeptBlocks(keep.session_id, keep.owner, of, keep.lapse_s - self.now) for keep, of in names if of]

    def due(self, until_s: float, most: int) -> list[DueSession]:
        """Sessions that are expected by then, each once for each of its turns; at most so many at a time."""
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
        """The next pause of a session."""
        if session.pauses >= 2:
            return session.usual_pause_s
        return self.pauses.quantile_s(0.5) or INITIAL_PAUSE_S

    def patience_s(self, expected_s: float) -> float:
        """How long one is waited for that says nothing of it."""
        late_s = self.pauses.quantile_s(PATIENCE_QUANTILE) if self.pauses.observed >= MIN_PAUSES else INITIAL_PATIENCE_S
        return max(late_s, MIN_PATIENCE_RATIO * expected_s)

    def price(self, blocks: int) -> float:
        """To have the last of so many blocks back, against computing the first of a prompt."""
        computed = 1.0 + blocks / DOUBLE_COST_BLOCKS
        return computed if self.file_price is None else max(1e-3, min(computed, self.file_price))

    @property
    def most_protected_blocks(self) -> int:
        """Of one owner: half of the pool, a third where two have sessions, and so on."""
        return self._total_blocks // (len(self._owners) + 1)

    def count(self, keep: SessionRetention | None, blocks: int) -> None:
        """So many more of its blocks are in the cache."""
        if keep is not None:
            keep.cached_blocks += blocks
            if keep.state is RetentionState.PROTECTED:
                self.protected_blocks += blocks

    def check(self) -> None:
        """Asserts that sums are right and bounds are held."""
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
        """What is cheap to have back goes as if it were due later."""
        keep.wake_s = min(due_s, keep.lapse_s)
        keep.due_s = self.now + max(0.0, due_s - self.now) / self.price(keep.blocks)
        heapq.heappush(self.wakes, (keep.wake_s, next(self._numbers), keep))
        self._put(keep)

    def _put(self, keep: SessionRetention) -> None:
        number = next(self._numbers)
        self.farthest.put(keep, number)
        self._owners[keep.owner].farthest.put(keep, number)

    def _bound(self, owner: Owner) -> None:
        """Those due last are as others, until the rest is within the bound."""
        while owner.blocks > self.most_protected_blocks and (keep := owner.farthest.first()) is not None:
            self._end(keep, RetentionState.OTHER)

    def _bound_all(self) -> None:
        """There is one owner more, and less for each."""
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
        """Its last turn left these."""
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
