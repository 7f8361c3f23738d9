"""Timelines of the processes of a cluster. Times are microseconds since 1970, by the router's clock."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SchedulerCall:
    """Call that changed which requests a scheduler has: "add", "reserve", "activate" or "abort"."""

    kind: str
    request_number: int  # number of the request on this worker


@dataclass(frozen=True, slots=True)
class TimelineStep:
    """Step of a worker's engine."""

    number: int
    began_us: int
    ended_us: int
    answers: int
    context_tokens: int
    prompts: Mapping[int, int]  # computed prompt tokens by request number on this worker
    answer_requests: tuple[int, ...]  # numbers of the requests on this worker that generate in the step
    moved_blocks: int
    held_blocks: int
    waiting: int
    late: int
    preempted: int
    spent_ms: Mapping[str, float]
    drafted_tokens: int = 0  # draft tokens computed in the step
    calls: tuple[SchedulerCall, ...] = ()  # calls since the previous step, in order
    observed_s: float = 0.0  # duration from which the scheduler sizes the next steps
    period_s: float = 0.0  # time since the end of the previous step
    digest: int = 0  # CRC-32 of the sampled tokens and their log-probabilities; 0: none, or an older release


@dataclass(frozen=True, slots=True)
class TimelineTransfer:
    """KV received from another worker."""

    began_us: int
    ended_us: int
    source: str  # host:port
    bytes: int
    transport: str


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """Request on a worker. Times are None until the request reaches that stage."""

    number: int  # number of the request on this worker
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
    accepted_tokens: int = 0  # drafted tokens that became part of the answer
    wanted_us: int | None = None  # time by which its first token is wanted; None: no TTFT objective
    ttft_slo_ms: float = 0.0  # TTFT objective; 0: none
    tbt_slo_ms: float = 0.0  # TBT objective; 0: none
    deadline_us: int | None = None  # time at which it fails unless it is complete; None: no TTFT objective


@dataclass(frozen=True, slots=True)
class RoutedStage:
    name: str
    began_us: int
    ended_us: int


@dataclass(frozen=True, slots=True)
class RoutedStall:
    at_us: int
    gap_ms: float
    causes_ms: Mapping[str, float]  # milliseconds by cause, such as `prompt tokens by chat-7`


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """Request as its router saw it."""

    request_id: str
    trace_id: str
    name: str
    status: str
    began_us: int
    ended_us: int
    stages: tuple[RoutedStage, ...]
    stalls: tuple[RoutedStall, ...]
    decided: str = ""  # what decided about it and what was decided, as JSON; empty unless asked for


@dataclass(frozen=True, slots=True)
class ProcessTimeline:
    """Timeline of a process: `requests` of a router, `steps` and `worker_requests` of a worker."""

    name: str
    role: str  # "router", "prefill" or "decode"
    endpoint: str
    error_us: int  # maximum error of its times
    failure: str  # reason why the timeline is missing
    total_blocks: int = 0
    requests: tuple[RoutedRequest, ...] = ()
    steps: tuple[TimelineStep, ...] = ()
    worker_requests: tuple[WorkerRequest, ...] = ()
    scheduler: Mapping[str, float] = field(default_factory=dict)  # settings of a worker's scheduler, by name
    decided: str = ""  # settings of a router that decide about placements, as JSON; empty unless asked for
