"""Timelines of the processes of a cluster. Times are microseconds since 1970, by the router's clock."""

from collections.abc import Mapping
from dataclasses import dataclass


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
