"""Sessions follow membership: workers come, leave, and are lost between two moments."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from baton.process.registry.worker_record import WorkerRecord, WorkerRole
from baton.protos import report_pb2
from baton.router.fleet.fleet import REPEATS_PER_S, Inbox, WorkerLinks, repeat_ms
from baton.router.fleet.link import WorkerLink
from baton.router.fleet.wire import ReportReader, Tag
from baton.router.placement.cluster import Cluster
from baton.router.placement.decide import Placement
from baton.router.types.events import Failed, FailureReason
from baton.router.types.request import Operation, PreparedRequest, Sampling, TokenPrompt
from tests.fixtures.router_defaults import DEFAULT_TIMING
from tests.fixtures.waiting import eventually
from tests.router.clusters import cluster_of, reported
from tests.router.fake_worker import FakePair

TIMING = replace(DEFAULT_TIMING, grace_s=0.05)
WAIT_S = 20.0


class ChangingMembership:
    """A list that a test changes."""

    def __init__(self, *workers: WorkerRecord) -> None:
        self.current = workers
        self.connected = True
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()

    async def change(self, *workers: WorkerRecord) -> None:
        """Returns when the change has been acted on."""
        self.current = workers
        self._taken.clear()
        self._changed.set()
        async with asyncio.timeout(WAIT_S):
            await self._taken.wait()

    async def start(self) -> None: ...
    async def close(self) -> None: ...
    async def watch(self) -> AsyncIterator[tuple[WorkerRecord, ...]]:
        while True:
            yield self.current
            self._taken.set()
            await self._changed.wait()
            self._changed.clear()


def records(pair: FakePair) -> tuple[WorkerRecord, WorkerRecord]:
    return (
        WorkerRecord("prefill-0", WorkerRole.PREFILL, pair.prefill.endpoint),
        WorkerRecord("decode-0", WorkerRole.DECODE, pair.decode.endpoint),
    )


class Followed:
    """A fleet that follows a membership while it is entered."""

    def __init__(self, membership: ChangingMembership) -> None:
        self.cluster = Cluster()
        self._changed = asyncio.Event()
        self.fleet = WorkerLinks(self.cluster, TIMING, on_change=self._changed.set)
        self._membership = membership

    async def __aenter__(self) -> "Followed":
        self._task = asyncio.create_task(self.fleet.follow(self._membership))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(self._task, return_exceptions=True)

    async def connected(self, *wanted: bool) -> None:
        """Waits until the workers are connected as wanted, in order."""
        async with asyncio.timeout(WAIT_S):
            while [worker.connected for worker in self.cluster.workers] != list(wanted):
                self._changed.clear()
                await self._changed.wait()


async def test_a_worker_that_leaves_the_registry_stays_while_its_session_is_up(pair: FakePair) -> None:
    prefill, decode = records(pair)
    membership = ChangingMembership(prefill, decode)
    async with Followed(membership) as followed:
        await followed.connected(True, True)
        await membership.change(prefill)
        await followed.connected(True, True)
        await pair.decode.stop()
        await followed.connected(True)


async def test_a_worker_that_comes_later_is_connected(pair: FakePair) -> None:
    prefill, decode = records(pair)
    membership = ChangingMembership(prefill)
    async with Followed(membership) as followed:
        await followed.connected(True)
        await membership.change(prefill, decode)
        await followed.connected(True, True)


@pytest.mark.parametrize(("workers", "asked_ms"), [(0, 500), (500, 500), (501, 1000), (2550, 3000)])
def test_workers_together_repeat_at_most_a_thousand_unchanged_reports_a_second(workers: int, asked_ms: int) -> None:
    assert repeat_ms(workers) == asked_ms
    assert workers / asked_ms * 1e3 <= REPEATS_PER_S


async def test_router_asks_all_workers_of_a_large_fleet_for_fewer_reports(
    pair: FakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.router.fleet.fleet.REPEATS_PER_S", 1)
    async with Followed(ChangingMembership(*records(pair))) as followed:
        await followed.connected(True, True)
        await eventually(lambda: [link.repeat_s for each in pair.workers for link in each.links] == [2.0, 2.0])


def test_no_silence_and_no_broken_connection_is_borne_for_two_seconds() -> None:
    timing = DEFAULT_TIMING
    assert timing.grace_s < 2.0 and timing.silence_s + timing.watch_s < 2.0


async def test_sessions_whose_connections_break_just_as_they_are_ended_end(
    pair: FakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks = asyncio.Event()

    async def read(session: WorkerLink, call: object) -> None:
        await breaks.wait()
        raise asyncio.InvalidStateError("the connection broke")

    monkeypatch.setattr(WorkerLink, "_read", read)
    async with Followed(ChangingMembership(*records(pair))) as followed:
        await followed.connected(True, True)
        breaks.set()


async def test_a_worker_lost_between_placement_and_dispatch_fails_the_attempt(pair: FakePair) -> None:
    async with Followed(ChangingMembership(*records(pair))) as followed:
        await followed.connected(True, True)
        placement = Placement(pair.prefill.endpoint, "127.0.0.1:1", 0, 0, 0, 0, 1, 1)
        inbox: Inbox[None] = Inbox(followed.fleet.wake_ups)
        followed.fleet.open(7, placement, inbox)
        sampling = Sampling(1, 0, (), 1)
        request = PreparedRequest(
            operation=Operation.GENERATE, prompt=TokenPrompt((1,)), request_id="r", sampling=sampling, token_ids=(1,),
            packed_tokens=b"\x01", cache_root=b"", block_hashes=(), fingerprint=b"f", block_tokens=4,
        )  # fmt: skip
        followed.fleet.dispatch(Tag(7, bytes(16), bytes(16), 1000, ""), request, placement)
        arrival = await inbox.take()
        assert arrival is not None and isinstance(arrival.event, Failed)
        assert (arrival.event.endpoint, arrival.event.reason) == ("127.0.0.1:1", FailureReason.WORKER_LOST)


def test_report_announces_capacity_and_no_change_of_workers() -> None:
    cluster, told = cluster_of({"p0": WorkerRole.PREFILL}), list[str]()
    links = WorkerLinks(
        cluster, TIMING, on_change=lambda: told.append("change"), on_capacity=lambda: told.append("capacity")
    )
    links.on_report("p0", reported())
    assert told == ["capacity"]
    links.on_disconnected("p0")
    assert told == ["capacity", "change"]


async def test_links_that_open_are_greeted_in_turn(pair: FakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    greeted, most, greet = 0, 0, WorkerLink._greet

    async def counted(link: WorkerLink, call: Any) -> None:
        nonlocal greeted, most
        greeted += 1
        most = max(most, greeted)
        try:
            await greet(link, call)
        finally:
            greeted -= 1

    monkeypatch.setattr("baton.router.fleet.fleet.GREETED_AT_ONCE", 1)
    monkeypatch.setattr(WorkerLink, "_greet", counted)
    async with Followed(ChangingMembership(*records(pair))) as followed:
        await followed.connected(True, True)
    assert most == 1


def test_report_reader_repeats_an_equal_report_and_reads_its_time() -> None:
    reader = ReportReader()
    assert reader.repeated(report_pb2.Report(steps=1, now_us=5)) is None
    first = reader.read(report_pb2.Report(steps=1, now_us=5))
    assert reader.repeated(report_pb2.Report(steps=1, now_us=9)) is first
    assert reader.now_us == 9
    assert reader.repeated(report_pb2.Report(steps=2, now_us=10)) is None
    assert reader.repeated(report_pb2.Report(steps=1, now_us=1 << 60)) is None
