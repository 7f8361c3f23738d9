"""The newest requests as an operator is shown them: plain values into protobuf."""

from collections.abc import Callable
from dataclasses import asdict

from baton.protos import admin_pb2
from baton.router.trace.recent import SHOWN_CAUSES, SeenRequest, shown_stalls
from baton.router.trace.record import Stall
from baton.router.types.events import Drafts
from baton.text.causes import StallCause

USUAL_REQUESTS = 64
MOST_REQUESTS = 256


def limit_of(message: admin_pb2.RecentRequestsRequest) -> int:
    return min(message.limit or USUAL_REQUESTS, MOST_REQUESTS)


def recent_request(seen: SeenRequest, now: float, worker_id: Callable[[str], str]) -> admin_pb2.RecentRequest:
    """`now`: monotonic seconds. `worker_id` names the worker at an endpoint, or gives its endpoint back."""
    gaps = seen.gaps
    return admin_pb2.RecentRequest(
        request_id=seen.request_id,
        trace_id=seen.trace_id,
        model=seen.model,
        phase=seen.phase,
        reason=seen.reason,
        prefill=worker_id(seen.prefill) if seen.prefill else "",
        decode=worker_id(seen.decode) if seen.decode else "",
        attempts=seen.attempts,
        prompt_tokens=seen.prompt_tokens or 0,
        cached_tokens=seen.cached_tokens,
        generated_tokens=seen.generated_tokens or 0,
        age_s=now - seen.arrived_s,
        stages=admin_pb2.RequestStages(**asdict(seen.stages)),
        tbt=admin_pb2.TokenTimes(p50_ms=gaps.p50_ms, p99_ms=gaps.p99_ms, max_ms=gaps.max_ms) if gaps else None,
        stalls=[request_stall(stall, seen.arrived_s, worker_id) for stall in shown_stalls(gaps)],
        stall_count=gaps.stall_count if gaps else 0,
        drafts=request_drafts(seen.drafts),
    )


def request_drafts(drafts: Drafts) -> admin_pb2.RequestDrafts | None:
    return admin_pb2.RequestDrafts(**drafts._asdict()) if drafts.happened else None


def request_stall(stall: Stall, arrived_s: float, worker_id: Callable[[str], str]) -> admin_pb2.RequestStall:
    """The detail of a recovery is the endpoint of the lost worker, which has a name too."""
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
