"""A worker that leaves: what it offers, and how long it stays for those that read."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.block_table import acquire
from baton.engine.kv_cache.sessions import KeptBlocks, SessionTurn
from baton.engine.runner.thread import EngineStopped
from baton.engine.scheduler.scheduler import Scheduler
from baton.worker.transfer import hand_over as subject
from baton.worker.transfer.hand_over import Leaving, hand_over


def kept(name: str) -> KeptBlocks:
    return KeptBlocks(name.encode(), b"owner", (b"block",), 10.0)


@dataclass
class LeavingWorker:
    """Its parts answer from scripts, the last entry for ever."""

    kept: list[list[KeptBlocks]]
    requests: list[bool] = field(default_factory=lambda: [False])
    readers: list[bool] = field(default_factory=lambda: [False])
    has_router: bool = True
    offered: list[bytes] = field(default_factory=list)

    def leaving(self) -> Leaving:
        return Leaving(self._kept, self._offer, lambda: _next(self.requests), lambda: _next(self.readers))

    def _kept(self) -> "Future[list[KeptBlocks]]":
        answer: Future[list[KeptBlocks]] = Future()
        answer.set_result(_next(self.kept))
        return answer

    def _offer(self, each: KeptBlocks) -> bool:
        if self.has_router:
            self.offered.append(each.session_id)
        return self.has_router


def _next(script: list[Any]) -> Any:
    return script.pop(0) if len(script) > 1 else script[0]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_times(**seconds: float) -> None:
        for name, value in ({"POLL_S": 0.0, "QUIET_S": 0.0} | seconds).items():
            monkeypatch.setattr(subject, name, value)

    set_times()
    return set_times


async def test_kept_sessions_are_offered_immediately_and_last_ones_after_their_requests(
    quick: Callable[..., None],
) -> None:
    worker = LeavingWorker([[kept("a")], [kept("b"), kept("a")]], requests=[True, True, False])
    await hand_over(worker.leaving())
    assert worker.offered == [b"a", b"b"]


async def test_hand_over_waits_while_others_read(quick: Callable[..., None]) -> None:
    quick(QUIET_S=1e-6)
    worker = LeavingWorker([[kept("a")]], readers=[True] * 5 + [False])
    await hand_over(worker.leaving())
    assert worker.readers == [False]


async def test_hand_over_without_router_or_sessions_does_not_wait(quick: Callable[..., None]) -> None:
    quick(QUIET_S=60.0)
    async with asyncio.timeout(20):
        for worker in (LeavingWorker([[]]), LeavingWorker([[kept("a")]], has_router=False)):
            await hand_over(worker.leaving())
            assert worker.offered == []


async def test_hand_over_waits_for_readers_within_a_bound(quick: Callable[..., None]) -> None:
    quick(QUIET_S=60.0, MOST_S=0.01)
    async with asyncio.timeout(20):
        for worker in (LeavingWorker([[kept("a")]], readers=[True]), LeavingWorker([[kept("a")]], requests=[True])):
            await hand_over(worker.leaving())
            assert worker.offered == [b"a"]


async def test_hand_over_of_a_stopped_engine_offers_nothing() -> None:
    worker = LeavingWorker([[]])
    failed: Future[list[KeptBlocks]] = Future()
    failed.set_exception(EngineStopped("stopped"))
    leaving = worker.leaving()
    await hand_over(Leaving(lambda: failed, leaving.offer, leaving.has_requests, leaving.has_readers))
    assert worker.offered == []


def turn(name: str, keep_for_s: float = 100.0) -> SessionTurn:
    return SessionTurn(name.encode(), b"owner", 0.0, keep_for_s)


def names(prefix: str, count: int) -> list[bytes]:
    return [f"{prefix}{number}".encode() for number in range(count)]


def test_received_session_is_protected_and_can_be_handed_on() -> None:
    scheduler = Scheduler(BlockPool(20), 4, 8, 4)
    batch, sessions = scheduler.batch, scheduler.pool.order.sessions
    incoming = batch.begin_take_over(names("a", 4))
    assert incoming is not None
    batch.end_take_over(incoming, 3, turn("agent"))
    assert sessions.protected_blocks == 3
    assert [(each.session_id, each.names) for each in sessions.kept()] == [(b"agent", tuple(names("a", 3)))]
    scheduler.pool.check_conservation()


def test_protected_blocks_are_not_evicted_for_received_ones() -> None:
    scheduler = Scheduler(BlockPool(10), 4, 8, 4)
    batch = scheduler.batch
    first = batch.begin_take_over(names("a", 5))
    assert first is not None
    batch.end_take_over(first, 5, turn("agent"))
    assert batch.begin_take_over(names("b", 6)) is None
    assert batch.begin_take_over(names("b", 5)) is not None
    assert scheduler.pool.order.evictions.protected == 0


def test_take_over_of_no_blocks_leaves_no_session() -> None:
    scheduler = Scheduler(BlockPool(10), 4, 8, 4)
    incoming = scheduler.batch.begin_take_over(names("a", 5))
    assert incoming is not None
    scheduler.batch.end_take_over(incoming, 0, turn("agent"))
    assert scheduler.pool.order.sessions.known == 0
    assert scheduler.pool.counts.free == 10


def test_session_with_a_turn_begun_during_the_pull_is_unchanged() -> None:
    scheduler = Scheduler(BlockPool(20), 4, 8, 4)
    batch, sessions = scheduler.batch, scheduler.pool.order.sessions
    incoming = batch.begin_take_over(names("a", 4))
    assert incoming is not None
    session = sessions.begin(turn("agent"))
    batch.end_take_over(incoming, 4, turn("agent"))
    assert session.ended_s is None
    table = acquire(scheduler.pool, names("a", 4), 4).table
    sessions.end(session, turn("agent"), 4, names("a", 4))
    table.release(session.keep)
    assert sessions.protected_blocks == 4
    assert session.pauses == 0
    scheduler.pool.check_conservation()
