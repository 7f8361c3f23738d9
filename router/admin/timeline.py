"""Timelines of this router and its workers, with all times on this router's clock.

The offset of a worker's clock is estimated from round trips. Its error is at most half of the fastest round trip.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

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
from baton.router.trace.decided import decided
from baton.router.trace.report import RecentReports, RequestReport
from baton.router.trace.token_records import TokenRecords

CALL_TIMEOUT_S = 5.0
CLOCK_CALLS = 4
LONGEST_MS = 3_600_000
BEFORE_MS = 1000  # time shown before a request's start; a delayed call to a worker shortens it
MAX_MS = 2**32 - 1  # maximum of the uint32 field `last_ms`
MOST_DECIDED_BYTES = 8 << 20  # as much as a bundle takes


@dataclass(frozen=True, slots=True)
class Timelines:
    """Collects timelines of this router and of its current `workers`.

    `settings`: settings of this router that decide about placements.
    """

    recent: RecentReports
    workers: Callable[[], Sequence[Worker]]
    tls: InternalTls | None
    secret: ClusterSecret | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    tokens: TokenRecords = field(default_factory=partial(TokenRecords, 0))

    async def collect(self, request: admin_pb2.GetTimelinesRequest) -> AsyncIterator[admin_pb2.ProcessTimeline]:
        """Yield this router's timeline, then those of the workers as they arrive. Raises: InvalidArgument, NotFound."""
        asked_s = time.monotonic()
        chosen, last_ms = self._chosen(request)
        own = admin_pb2.ProcessTimeline(name="router", requests=map(routed_request, chosen))
        if request.with_inputs:
            own.decided = json.dumps(self.settings)
            await _add_decided(own, chosen, self.tokens if request.with_tokens else None)
        yield own
        asked = [self._worker(worker, asked_s, last_ms) for worker in self.workers()]
        for arriving in asyncio.as_completed(asked):
            yield await arriving

    def _chosen(self, request: admin_pb2.GetTimelinesRequest) -> tuple[list[RequestReport], int]:
        now_ns = WallClock.now().wall_ns
        if request.request_id:
            found = self.recent.find(request.request_id)
            if found is None:
                raise NotFound("request", request.request_id)
            return [found], max(0, now_ns - found.began_ns) // 10**6 + BEFORE_MS
        if not 0 < request.last_ms <= LONGEST_MS:
            raise InvalidArgument("last_ms", f"must be from 1 to {LONGEST_MS} if request_id is empty")
        return self.recent.since(now_ns - request.last_ms * 10**6), request.last_ms

    async def _worker(self, worker: Worker, asked_s: float, last_ms: int) -> admin_pb2.ProcessTimeline:
        """Return a worker's timeline. It begins `last_ms` before `asked_s` (monotonic seconds) and ends now."""
        name = worker.endpoint if worker.description is None else worker.description.worker_id
        timeline = admin_pb2.ProcessTimeline(name=name, role=ROLES[worker.role], endpoint=worker.endpoint)
        try:
            options, tls = INTERNAL_CHANNEL_OPTIONS, self.tls
            async with open_async_channel(worker.endpoint, options, tls, self.secret) as channel:
                stub = timeline_pb2_grpc.TimelineServiceStub(channel)
                timeline.offset_us, timeline.error_us = await _offset(stub)
                since_ms = min(last_ms + round((time.monotonic() - asked_s) * 1e3), MAX_MS)
                request = timeline_pb2.GetTimelineRequest(last_ms=since_ms)
                timeline.timeline.CopyFrom(await stub.GetTimeline(request, timeout=CALL_TIMEOUT_S))
        except grpc.aio.AioRpcError as error:
            timeline.failure = f"{error.code().name}: {error.details()}"
        return timeline


async def _offset(stub: timeline_pb2_grpc.TimelineServiceStub) -> tuple[int, int]:
    """Return the offset from the worker's monotonic to this router's wall clock, and its error, in microseconds."""
    estimate, wall = ClockEstimate(), WallClock.now()
    for _ in range(CLOCK_CALLS):
        sent_s = time.monotonic()
        answer = await stub.GetTimeline(timeline_pb2.GetTimelineRequest(), timeout=CALL_TIMEOUT_S)
        estimate.take(sent_s, time.monotonic(), 0.0, answer.now_us / 1e6)
    best = estimate.best or ClockOffset(0.0, CALL_TIMEOUT_S)  # fallback if no round trip took measurable time
    return wall.at(-best.offset_s) // 1000, round(best.error_s * 1e6)


async def _add_decided(
    own: admin_pb2.ProcessTimeline, reports: Sequence[RequestReport], tokens: TokenRecords | None
) -> None:
    """Add to each request what decided about it, newest first, up to MOST_DECIDED_BYTES.

    `tokens`: records of token ids to include; None: none.
    """
    left_bytes = MOST_DECIDED_BYTES
    for message, report in zip(reversed(own.requests), reversed(reports), strict=True):
        found = None if tokens is None else tokens.find(report.request_id, report.trace_id)
        text = json.dumps({**decided(report), **({} if found is None else {"tokens": found.plain()})})
        left_bytes -= len(text)
        if left_bytes < 0:
            return
        message.decided = text
        await asyncio.sleep(0)  # answers must not wait until all requests are converted


def routed_request(report: RequestReport) -> admin_pb2.RoutedRequest:
    """Convert the report of a completed request, with its stages and stalls. Times are microseconds since 1970."""
    return admin_pb2.RoutedRequest(
        request_id=report.request_id,
        trace_id=report.trace_id,
        name=report.name,
        status="" if report.status == "OK" else report.status,
        began_us=report.began_ns // 1000,
        ended_us=report.ended_ns // 1000,
        stages=[
            admin_pb2.RoutedStage(name=each.name, began_us=each.began_ns // 1000, ended_us=each.ended_ns // 1000)
            for each in report.stage_times
        ],
        stalls=[
            admin_pb2.RoutedStall(
                at_us=report.clock.at(stall.at_s) // 1000,
                gap_ms=stall.gap_ms,
                usual_ms=stall.usual_ms,
                causes=map(cause_message, stall.causes),
            )
            for stall in (report.gaps.stalls if report.gaps is not None else ())
        ],
    )
