"""Timelines of this router and its workers: asked for at once, each placed on this router's clock.

No clock is compared: how far a worker's is off is estimated by calls there and back, and is right to within half of the
fastest one's time.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import grpc

from baton.process.errors import InvalidArgument, NotFound
from baton.process.security.cluster_secret import ClusterSecret
from baton.process.security.tls import InternalTls, open_async_channel
from baton.process.serving.grpc_options import INTERNAL_CHANNEL_OPTIONS
from baton.process.telemetry.clock_offset import ClockEstimate, ClockOffset
from baton.process.telemetry.spans import WallClock
from baton.protos import admin_pb2, timeline_pb2, timeline_pb2_grpc
from baton.router.admin.wire import ROLES
from baton.router.fleet.wire import cause_message
from baton.router.placement.cluster import Worker
from baton.router.trace.recent import RecentTimelines, RequestTimeline

CALL_TIMEOUT_S = 5.0
CLOCK_CALLS = 4
LONGEST_MS = 3_600_000
BEFORE_MS = 1000  # of a request: what was done just before it, and the time that a call takes to reach a busy worker
MOST_MS = 2**32 - 1  # that fit into the field


@dataclass(frozen=True, slots=True)
class Timelines:
    """`workers`: those of the cluster as it is now."""

    recent: RecentTimelines
    workers: Callable[[], Sequence[Worker]]
    tls: InternalTls | None
    secret: ClusterSecret | None = None

    async def collect(self, request: admin_pb2.GetTimelinesRequest) -> AsyncIterator[admin_pb2.ProcessTimeline]:
        """This router's first, then those of the workers as they come. Raises: InvalidArgument, NotFound."""
        asked_s = time.monotonic()
        chosen, last_ms = self._chosen(request)
        yield admin_pb2.ProcessTimeline(name="router", requests=map(request_message, chosen))
        asked = [self._worker(worker, asked_s, last_ms) for worker in self.workers()]
        for arriving in asyncio.as_completed(asked):
            yield await arriving

    def _chosen(self, request: admin_pb2.GetTimelinesRequest) -> tuple[list[RequestTimeline], int]:
        now_ns = WallClock.now().wall_ns
        if request.request_id:
            found = self.recent.find(request.request_id)
            if found is None:
                raise NotFound("request", request.request_id)
            return [found], max(0, now_ns - found.root.start_ns) // 10**6 + BEFORE_MS
        if not 0 < request.last_ms <= LONGEST_MS:
            raise InvalidArgument("last_ms", f"must be between 1 and {LONGEST_MS}, without a request_id")
        return self.recent.since(now_ns - request.last_ms * 10**6), request.last_ms

    async def _worker(self, worker: Worker, asked_s: float, last_ms: int) -> admin_pb2.ProcessTimeline:
        """`last_ms`: before `asked_s`, monotonic, which may be a while ago when the worker hears of it."""
        name = worker.endpoint if worker.description is None else worker.description.worker_id
        made = admin_pb2.ProcessTimeline(name=name, role=ROLES[worker.role], endpoint=worker.endpoint)
        try:
            options, tls = INTERNAL_CHANNEL_OPTIONS, self.tls
            async with open_async_channel(worker.endpoint, options, tls, self.secret) as channel:
                stub = timeline_pb2_grpc.TimelineServiceStub(channel)
                made.offset_us, made.error_us = await _offset(stub)
                since_ms = min(last_ms + round((time.monotonic() - asked_s) * 1e3), MOST_MS)
                request = timeline_pb2.GetTimelineRequest(last_ms=since_ms)
                made.timeline.CopyFrom(await stub.GetTimeline(request, timeout=CALL_TIMEOUT_S))
        except grpc.aio.AioRpcError as error:
            made.failure = f"{error.code().name}: {error.details()}"
        return made


async def _offset(stub: timeline_pb2_grpc.TimelineServiceStub) -> tuple[int, int]:
    """To be added to the worker's monotonic time for the wall clock of this router, and its error; microseconds."""
    estimate, wall = ClockEstimate(), WallClock.now()
    for _ in range(CLOCK_CALLS):
        sent_s = time.monotonic()
        answer = await stub.GetTimeline(timeline_pb2.GetTimelineRequest(), timeout=CALL_TIMEOUT_S)
        estimate.take(sent_s, time.monotonic(), 0.0, answer.now_us / 1e6)
    best = estimate.best or ClockOffset(0.0, CALL_TIMEOUT_S)  # of calls whose ways took no time at all
    return wall.at(-best.offset_s) // 1000, round(best.error_s * 1e6)


def request_message(timeline: RequestTimeline) -> admin_pb2.RoutedRequest:
    root = timeline.root
    return admin_pb2.RoutedRequest(
        request_id=timeline.request_id,
        trace_id=timeline.trace_id,
        name=root.name,
        status=root.error or "",
        began_us=root.start_ns // 1000,
        ended_us=root.end_ns // 1000,
        stages=[
            admin_pb2.RoutedStage(name=span.name, began_us=span.start_ns // 1000, ended_us=span.end_ns // 1000)
            for span in timeline.spans[1:]
        ],
        stalls=[
            admin_pb2.RoutedStall(
                at_us=timeline.clock.at(stall.at_s) // 1000,
                gap_ms=stall.gap_ms,
                usual_ms=stall.usual_ms,
                causes=map(cause_message, stall.causes),
            )
            for stall in timeline.stalls
        ],
    )
