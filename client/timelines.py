"""Timelines of the processes of a cluster, as the admin port of a router gives them, in plain types."""

from collections.abc import Mapping
from dataclasses import dataclass

from baton.protos import admin_pb2, session_pb2, timeline_pb2

ROLES = {session_pb2.ROLE_PREFILL: "prefill", session_pb2.ROLE_DECODE: "decode"}
_CAUSE_PREFIX = "STALL_CAUSE_"


@dataclass(frozen=True, slots=True)
class TimelineStep:
    """One step of a worker's engine. Times are microseconds since 1970, by the router's clock."""

    number: int
    began_us: int
    ended_us: int
    answers: int
    context_tokens: int
    prompts: Mapping[int, int]  # tokens by the request's number on this worker
    answer_requests: tuple[int, ...]  # numbers on this worker
    moved_blocks: int
    held_blocks: int
    waiting: int
    late: int
    preempted: int
    spent_ms: Mapping[str, float]
    drafted_tokens: int = 0  # computed beside the newest tokens of answers


@dataclass(frozen=True, slots=True)
class TimelineTransfer:
    """KV that came from another worker."""

    began_us: int
    ended_us: int
    source: str  # host:port
    bytes: int
    transport: str


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """One request on a worker. None: it did not come to that, or not yet."""

    number: int  # on this worker
    request_id: str
    arrived_us: int
    prompt_tokens: int
    cached_tokens: int
    transfer: TimelineTransfer | None
    first_token_us: int | None
    last_token_us: int | None
    tokens: int
    ended_us: int | None
    failure: str
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of those, the ones that were drawn


@dataclass(frozen=True, slots=True)
class RoutedStage:
    name: str
    began_us: int
    ended_us: int


@dataclass(frozen=True, slots=True)
class RoutedStall:
    at_us: int
    gap_ms: float
    causes_ms: Mapping[str, float]  # with the request to blame, where there is one


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """One request as its router saw it."""

    request_id: str
    trace_id: str
    name: str
    status: str
    began_us: int
    ended_us: int
    stages: tuple[RoutedStage, ...]
    stalls: tuple[RoutedStall, ...]


@dataclass(frozen=True, slots=True)
class ProcessTimeline:
    """Of a router `requests`, of a worker `steps` and `worker_requests`."""

    name: str
    role: str  # "router", "prefill" or "decode"
    endpoint: str
    error_us: int  # its times are right to within this
    failure: str  # why there is none
    total_blocks: int = 0
    requests: tuple[RoutedRequest, ...] = ()
    steps: tuple[TimelineStep, ...] = ()
    worker_requests: tuple[WorkerRequest, ...] = ()


def process_timeline(message: admin_pb2.ProcessTimeline) -> ProcessTimeline:
    offset_us = message.offset_us
    return ProcessTimeline(
        message.name,
        ROLES.get(message.role, "router"),
        message.endpoint,
        message.error_us,
        message.failure,
        message.timeline.total_blocks,
        tuple(map(_routed, message.requests)),
        tuple(_step(step, offset_us) for step in message.timeline.steps),
        tuple(_request(request, offset_us) for request in message.timeline.requests),
    )


def _routed(request: admin_pb2.RoutedRequest) -> RoutedRequest:
    return RoutedRequest(
        request.request_id,
        request.trace_id,
        request.name,
        request.status,
        request.began_us,
        request.ended_us,
        tuple(RoutedStage(stage.name, stage.began_us, stage.ended_us) for stage in request.stages),
        tuple(
            RoutedStall(stall.at_us, stall.gap_ms, {_cause(cause): cause.ms for cause in stall.causes})
            for stall in request.stalls
        ),
    )


def _cause(cause: session_pb2.GapCause) -> str:
    """Such as `prompt tokens by chat-7`."""
    name = session_pb2.StallCause.Name(cause.cause).removeprefix(_CAUSE_PREFIX).lower().replace("_", " ")
    return f"{name} by {cause.request_id}" if cause.request_id else name


def _step(step: timeline_pb2.TimelineStep, offset_us: int) -> TimelineStep:
    return TimelineStep(
        step.number,
        step.began_us + offset_us,
        step.ended_us + offset_us,
        step.answers,
        step.context_tokens,
        {prompt.request_number: prompt.tokens for prompt in step.prompts},
        tuple(step.request_numbers),
        step.moved_blocks,
        step.held_blocks,
        step.waiting,
        step.late,
        step.preempted,
        dict(step.spent_ms),
        step.drafted_tokens,
    )


def _request(request: timeline_pb2.TimelineRequest, offset_us: int) -> WorkerRequest:
    def moment(us: int) -> int | None:
        return us + offset_us if us else None

    transfer = None
    if request.HasField("transfer"):
        given = request.transfer
        transfer = TimelineTransfer(
            given.began_us + offset_us, given.ended_us + offset_us, given.source, given.bytes, given.transport
        )
    return WorkerRequest(
        request.number,
        request.request_id,
        request.arrived_us + offset_us,
        request.prompt_tokens,
        request.cached_tokens,
        transfer,
        moment(request.first_token_us),
        moment(request.last_token_us),
        request.tokens,
        moment(request.ended_us),
        request.failure,
        request.drafted_tokens,
        request.accepted_tokens,
    )
