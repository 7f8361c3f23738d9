"""Timelines of workers are asked for: as far back as a request began, however long asking takes."""

import asyncio
import time
from functools import partial
from typing import Any

import pytest

from baton.process.errors import InvalidArgument, NotFound
from baton.process.registry.worker_record import WorkerRole
from baton.protos import admin_pb2, timeline_pb2, timeline_pb2_grpc
from baton.router.admin.timeline import BEFORE_MS, CLOCK_CALLS, Timelines
from baton.router.placement.cluster import Worker
from baton.router.trace.report import RecentReports, report_of
from tests.fixtures.servers import loop_server
from tests.fixtures.stalled import stalled

LATE_S = 0.1
AGO_S = 0.2
ASKING_MS = CLOCK_CALLS * LATE_S * 1e3
ROUNDED_MS = 2  # two numbers that are cut to whole milliseconds


class LateWorker(timeline_pb2_grpc.TimelineServiceServicer):
    """As on a busy machine: a call for its clock waits before it is looked at."""

    def __init__(self) -> None:
        self.last_ms = 0

    async def GetTimeline(self, request: Any, context: Any) -> timeline_pb2.GetTimelineResponse:
        if request.last_ms:
            self.last_ms = request.last_ms
        else:
            await asyncio.sleep(LATE_S)
        return timeline_pb2.GetTimelineResponse(now_us=round(time.monotonic() * 1e6))


def ended() -> RecentReports:
    """One request, "r", that began AGO_S ago."""
    record = stalled("r")
    record.timeline.ended_s = record.timeline.arrived_s
    record.timeline.arrived_s -= AGO_S
    recent = RecentReports()
    recent.add(report_of(record, time.monotonic(), None))
    return recent


async def asked(recent: RecentReports, **request: Any) -> tuple[list[admin_pb2.ProcessTimeline], int]:
    """What came, and how far the worker was asked to look back, milliseconds."""
    servicer = LateWorker()
    async with loop_server(partial(timeline_pb2_grpc.add_TimelineServiceServicer_to_server, servicer)) as port:
        workers = [Worker(f"127.0.0.1:{port}", WorkerRole.PREFILL)]
        found = Timelines(recent, lambda: workers, None).collect(admin_pb2.GetTimelinesRequest(**request))
        return [each async for each in found], servicer.last_ms


async def test_timeline_reaches_back_to_shortly_before_the_request() -> None:
    began_s, recent = time.monotonic() - AGO_S, ended()
    (router, worker), last_ms = await asked(recent, request_id="r")
    assert [each.request_id for each in router.requests] == ["r"] and not worker.failure
    most_ms = (time.monotonic() - began_s) * 1e3 + BEFORE_MS
    assert AGO_S * 1e3 + ASKING_MS + BEFORE_MS - ROUNDED_MS <= last_ms <= most_ms + ROUNDED_MS


async def test_time_that_asking_takes_is_not_cut_off() -> None:
    _, last_ms = await asked(ended(), last_ms=1000)
    assert last_ms >= 1000 + ASKING_MS - ROUNDED_MS, "the calls for its clock are made first"


async def test_unknown_requests_and_bad_times_are_refused() -> None:
    with pytest.raises(NotFound):
        await asked(ended(), request_id="other")
    for last_ms in (0, 3_600_001):
        with pytest.raises(InvalidArgument, match="last_ms"):
            await asked(ended(), last_ms=last_ms)
