"""Conversion of reports of the newest requests into protobuf messages."""

from collections.abc import Callable
from dataclasses import asdict

from baton.protos import admin_pb2
from baton.router.trace.record import Stall
from baton.router.trace.report import SHOWN_CAUSES, RequestReport, shown_stalls
from baton.router.types.events import Drafts
from baton.text.causes import StallCause

DEFAULT_REQUESTS = 64
MAX_REQUESTS = 256


def limit_of(message: admin_pb2.RecentRequestsRequest) -> int:
    """Return the maximum number of requests in the response."""
    return min(message.limit or DEFAULT_REQUESTS, MAX_REQUESTS)


def recent_request(report: RequestReport, now: float, worker_id: Callable[[str], str]) -> admin_pb2.RecentRequest:
    """Convert a report. `now`: monotonic seconds, for its age. `worker_id` maps an endpoint to the worker's id."""
    gaps = report.gaps
    return admin_pb2.RecentRequest(
        request_id=report.request_id,
        trace_id=report.trace_id,
        model=report.model,
        phase=report.phase,
        reason=report.reason,
        prefill=worker_id(report.prefill) if report.prefill else "",
        decode=worker_id(report.decode) if report.decode else "",
        attempts=report.attempts,
        prompt_tokens=report.prompt_tokens or 0,
        cached_tokens=report.cached_tokens,
        generated_tokens=report.generated_tokens or 0,
        age_s=now - report.arrived_s,
        stages=admin_pb2.RequestStages(**asdict(report.stages)),
        tbt=admin_pb2.TokenTimes(p50_ms=gaps.p50_ms, p99_ms=gaps.p99_ms, max_ms=gaps.max_ms) if gaps else None,
        stalls=[request_stall(stall, report.arrived_s, worker_id) for stall in shown_stalls(gaps)],
        stall_count=gaps.stall_count if gaps else 0,
        drafts=request_drafts(report.drafts),
    )


def request_drafts(drafts: Drafts) -> admin_pb2.RequestDrafts | None:
    return admin_pb2.RequestDrafts(**drafts._asdict()) if drafts.happened else None


def request_stall(stall: Stall, arrived_s: float, worker_id: Callable[[str], str]) -> admin_pb2.RequestStall:
    """Convert a stall. The lost worker of a recovery is named by its id instead of its endpoint."""
    return admin_pb2.RequestStall(
        at_ms=(stall.at_s - arrived_s) * 1e3,
        gap_ms=stall.gap_ms,
        usual_ms=stall.usual_ms,
        causes=[
            admin_pb2.RequestStallCause(
                cause=part.cause.value,
                ms=part.ms,
                culprit=part.request_id,
                detail=worker_id(part.detail) if part.cause is StallCause.RECOVERY else part.detail,
            )
            for part in stall.causes[:SHOWN_CAUSES]
        ],
        choice=stall.choice,
    )
