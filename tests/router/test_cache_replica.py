"""A router's view of one cache against a worker's own log, over a connection that loses, repeats and reorders."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.engine.kv_cache.block_pool import CacheChanges as EngineChanges
from baton.protos import cache_pb2
from baton.router.cache.audit import LEAST_REQUESTS, RESYNC_PERIOD_S, WINDOW_REQUESTS, CacheAudit
from baton.router.cache.follower import ASK_AGAIN_S, BEHIND_S
from baton.router.cache.prefix_index import PrefixIndex
from baton.router.cache.replica import CacheReplica, CacheSnapshotPart, CacheUpdate
from baton.router.cache.wire import changes as changes_of
from baton.router.cache.wire import snapshot_part
from baton.router.types.worker import CacheSum
from baton.worker.cache_events import CacheLog

BLOCKS = [bytes([number]) * 32 for number in range(12)]
some = st.sets(st.sampled_from(BLOCKS))
WORKER = "w0"


class Unreliable(RuleBasedStateMachine):
    """A worker whose cache changes and that restarts, and a router. What is under way may go wrong in any way."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.index = PrefixIndex()
        self.start_worker()

    def start_worker(self) -> None:
        self.cache: set[bytes] = set()
        self.log = CacheLog(message_hashes=3)
        self.index.forget(WORKER)
        self.view = CacheReplica(WORKER, self.index)
        self.under_way: list[cache_pb2.CacheEvents | cache_pb2.CacheSnapshot] = []
        self.view.connected()
        self.ask()

    def ask(self) -> None:
        self.under_way += self.log.snapshot()

    @rule(stored=some, evicted=some)
    def change(self, stored: set[bytes], evicted: set[bytes]) -> None:
        self.cache = (self.cache - evicted) | (stored - evicted)
        changes = EngineChanges(tuple(stored - evicted), tuple(evicted))
        self.under_way += self.log.record(changes)

    @rule()
    def deliver_all(self) -> None:
        while self.under_way:
            self.deliver(0)

    @rule(place=st.integers(0, 5))
    def deliver(self, place: int) -> None:
        if not self.under_way:
            return
        message = self.under_way.pop(place % len(self.under_way))
        if isinstance(message, cache_pb2.CacheSnapshot):
            self.view.take_snapshot(snapshot_part(message), self.now)
        elif self.view.take_changes(changes_of(message), self.now):
            self.ask()

    @rule(place=st.integers(0, 5))
    def lose(self, place: int) -> None:
        if self.under_way:
            self.under_way.pop(place % len(self.under_way))

    @rule(place=st.integers(0, 5))
    def repeat(self, place: int) -> None:
        if self.under_way:
            self.under_way.append(self.under_way[place % len(self.under_way)])

    @rule()
    def restart(self) -> None:
        self.start_worker()

    @rule()
    def reconnect(self) -> None:
        self.under_way.clear()
        self.view.disconnected()
        self.view.connected()
        self.ask()

    @rule()
    def report(self) -> None:
        told = CacheSum(self.log.sequence, self.log.digest, self.log.blocks)
        if self.view.check(told, self.now):
            self.ask()

    @rule(seconds=st.sampled_from([0.1, 0.6, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def the_log_knows_the_cache(self) -> None:
        assert self.log.blocks == len(self.cache)

    @invariant()
    def what_claims_to_be_up_to_date_is(self) -> None:
        # a snapshot whose parts come between changes may be mixed up; its own sum shows it
        if self.view.follows and self.view.exact and self.view.sequence == self.log.sequence and not self.under_way:
            assert self.index.digest(WORKER) == self.log.digest

    def teardown(self) -> None:
        """Once nothing goes wrong any more, a few reports heal whatever did."""
        self.under_way.clear()
        for _ in range(5):
            self.now += max(ASK_AGAIN_S, BEHIND_S) + 0.1
            self.report()
            self.deliver_all()
        self.report()
        assert self.view.follows and self.view.exact
        assert self.index.hits([BLOCKS[0]]).ready == ({WORKER: 1} if BLOCKS[0] in self.cache else {})
        assert self.index.blocks(WORKER) == len(self.cache)


TestUnreliable = Unreliable.TestCase
TestUnreliable.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def follow(*stored: bytes) -> tuple[CacheReplica, PrefixIndex]:
    index = PrefixIndex()
    view = CacheReplica(WORKER, index)
    view.connected()
    view.take_snapshot(CacheSnapshotPart(5, 0, 1, stored), now=0.0)
    return view, index


def test_gap_requests_a_snapshot_immediately_and_then_once_a_second() -> None:
    view, _ = follow()
    assert view.take_changes(CacheUpdate(7, (), ()), now=20.0)
    assert not view.follows and view.resyncs == 1
    assert not view.check(CacheSum(8, 0, 0), now=20.2)
    assert view.check(CacheSum(8, 0, 0), now=20.0 + ASK_AGAIN_S + 0.1)


def test_change_counted_by_a_report_and_never_received_is_noticed() -> None:
    view, _ = follow()
    assert not view.check(CacheSum(6, 1, 1), now=9.0)
    assert view.check(CacheSum(6, 1, 1), now=9.1 + BEHIND_S)


def test_sum_that_differs_asks_for_a_snapshot() -> None:
    view, _ = follow(BLOCKS[1])
    assert view.check(CacheSum(5, digest=0, blocks=1), now=9.0)
    assert not view.exact and not view.follows


def test_worker_that_tells_of_nothing_is_never_asked_again() -> None:
    view = CacheReplica(WORKER, PrefixIndex())
    view.connected()
    assert not any(view.check(None, now=float(second)) for second in range(10))


def test_assumed_blocks_without_a_snapshot_are_forgotten_in_lru_order() -> None:
    index = PrefixIndex()
    view = CacheReplica(WORKER, index)
    view.connected()
    view.assume([BLOCKS[0], BLOCKS[1]], capacity_blocks=3)
    view.assume([BLOCKS[2], BLOCKS[3]], capacity_blocks=3)
    assert index.hits([BLOCKS[0], BLOCKS[1]]).ready == {WORKER: 1}
    view.take_snapshot(CacheSnapshotPart(0, 0, 1, ()), now=0.0)
    assert len(index) == 0
    view.assume([BLOCKS[0]], capacity_blocks=3)
    assert len(index) == 0


def test_tokens_are_counted_on_both_sides() -> None:
    audit = CacheAudit()
    for predicted, actual in ((64, 64), (64, 32), (0, 96)):
        audit.take(predicted, actual)
    assert (audit.checked_requests, audit.equal_requests) == (3, 1)
    assert (audit.missing_tokens, audit.surplus_tokens) == (32, 96)


def test_drift_is_that_of_the_newest_requests() -> None:
    audit = CacheAudit()
    audit.take(32, 0)
    assert audit.drift == 1.0
    for _ in range(WINDOW_REQUESTS):
        audit.take(32, 32)
    assert audit.drift == 0.0


def test_much_drift_asks_for_a_resync_once_in_a_while() -> None:
    audit = CacheAudit()

    def drift() -> None:
        for _ in range(LEAST_REQUESTS):
            audit.take(32, 0)

    audit.take(32, 0)
    assert not audit.wants_resync(now=0.0), "one request is no drift"
    drift()
    assert audit.wants_resync(now=1.0)
    drift()
    assert not audit.wants_resync(now=2.0)
    assert audit.wants_resync(now=1.0 + RESYNC_PERIOD_S)
