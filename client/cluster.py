"""The operator's view: workers, pages, load, requests, and why a request was placed on its workers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from baton.client.types import Model

Role: TypeAlias = Literal["prefill", "decode", "unknown"]


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Blocks of one KV pool: free + cached + held == total, and held is the sum of the two below it."""

    total: int
    free: int
    cached: int  # in no use, kept under their hash until evicted
    held: int
    held_by_sequences: int
    held_by_transfers: int


@dataclass(frozen=True, slots=True)
class Link:
    """How a worker reads KV from another one."""

    endpoint: str  # host:port of the other one
    transport: str  # shared_memory, cuda_ipc, nccl, gloo or grpc
    gb_per_s: float  # measured when the two met
    fallback: str  # why no faster way was taken; empty where the fastest was


@dataclass(frozen=True, slots=True)
class Load:
    """A worker's newest report to this router."""

    limit_blocks: int  # most blocks that this router may have committed there
    limit_slots: int  # most sequences that this router may have there
    pages: PageCounts
    waiting_requests: int
    running_sequences: int
    pending_tokens: int  # still to be prefilled
    draining: bool
    steps: int
    cache_query_tokens: int = 0  # looked up in the prefix cache since the worker's start
    cache_hit_tokens: int = 0  # and found
    preemptions: int = 0  # sequences that gave their pages back and were resumed, since the worker's start
    unfilled_slots: int = 0  # tokens that held blocks have room for and do not hold: internal fragmentation
    links: tuple[Link, ...] = ()  # of those it reads from
    checked_blocks: int = 0  # read from others and compared by checksum, since the worker's start
    checksum_mismatches: int = 0  # of those: they were thrown away and computed anew


@dataclass(frozen=True, slots=True)
class CacheView:
    """A router's view of a worker's prefix cache, and how right it was."""

    follows: bool  # the worker's own events; otherwise it is guessed from the prompts that the router sent there
    exact: bool  # equal to the worker's own sum at its newest report
    blocks: int  # that the worker has, as far as known
    sequence: int  # of the newest events that are in it
    resyncs: int  # snapshots that were asked for because something was missing or wrong
    checked_requests: int  # of which the predicted and the actual cached tokens are known
    equal_requests: int  # of those, where they are equal
    missing_tokens: int  # predicted and not there
    surplus_tokens: int  # there and not predicted
    drift: float  # share of the newest requests, at most 64, where they differ


@dataclass(frozen=True, slots=True)
class TierView:
    """A router's view of a worker's files below its pool."""

    follows: bool  # the worker's own events
    folder_blocks: int  # in its own files, as far as known
    directory_blocks: int  # different ones in the files of all workers of its directory
    directory_id: str  # hexadecimal; workers with the same one read each other's files


@dataclass(frozen=True, slots=True)
class Quantiles:
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    worker_id: str
    role: Role
    endpoint: str  # host:port
    pid: int
    epoch: int
    connected: bool
    fingerprint: str  # hexadecimal; only workers with the same one are paired
    model: Model
    model_path: str
    total_blocks: int
    total_slots: int
    in_flight_requests: int  # of this router
    load: Load | None  # None: no report yet
    roles: tuple[Role, ...] = ()  # that it can change to; none: it has one for life
    arithmetic: str = ""  # workers with the same one compute the same bits on CPUs; empty: an older worker
    cache_view: CacheView | None = None  # None: it was never connected
    tier_view: TierView | None = None  # None: it has no files, or they are not open
    deaths: int = 0  # how often a process of this name was found gone that had not drained
    drains: int = 0  # how often one ended after it had drained
    role_changes: int = 0
    lost_sessions: int = 0  # for another reason: silence, or a connection that did not come back in time
    tbt: Quantiles | None = None  # of the answers that ended last on this decode worker; None: none was long enough
    refused: str = ""  # why it gets no requests though its process answers; empty: it is not refused
    release: str = ""  # empty: a release before 0.2.0, or nothing is known of it
    protocol: int = 0  # the newest that it speaks; 0: likewise
    kv_layout: str = ""  # in words; only workers with the same one are paired


@dataclass(frozen=True, slots=True)
class PlannerStatus:
    """The state of the planner of roles. Pressures: 1 is as much as the SLOs allow."""

    mode: str  # propose or act
    prefill_pressure: float
    decode_pressure: float
    verdict: str
    changes: int  # made since the router's start
    desired_prefill_workers: int = 0  # that there should be; 0: no worker has had that role yet
    desired_decode_workers: int = 0


@dataclass(frozen=True, slots=True)
class RouterStatus:
    """Another router of the cluster."""

    router_id: str  # hexadecimal
    address: str  # host:port of its public gRPC
    uptime_s: float
    requests: int  # its requests on the workers
    tokens: int  # the same, counted from dispatch
    release: str = ""  # empty: before 0.2.0


@dataclass(frozen=True, slots=True)
class Latency:
    """Of the requests that ended on this router in the last minute."""

    requests: int  # how many, at most 256
    ttft: Quantiles
    tbt: Quantiles | None  # None: no answer was long enough to have one


@dataclass(frozen=True, slots=True)
class EndedRequests:
    outcome: str  # answered, cancelled, refused or failed
    reason: str  # in one word; empty where they were answered
    count: int


@dataclass(frozen=True, slots=True)
class RequestTotals:
    """Counts of a router's requests since it started, running ones included."""

    started: int = 0
    ended: tuple[EndedRequests, ...] = ()
    prompt_tokens: int = 0  # of prompts that workers were given
    generated_tokens: int = 0  # of answers, as they go out


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    ready: bool
    detail: str  # why not ready, or in which way degraded; empty when all is well
    registry_connected: bool
    active_requests: int
    queued_requests: int  # of the active ones
    workers: tuple[WorkerStatus, ...]
    other_routers: int = 0  # whose load this router knows
    planner: PlannerStatus | None = None  # None: there is none
    indexed_blocks: int = 0  # different KV blocks that the router knows of, on any worker
    routers: tuple[RouterStatus, ...] = ()  # the other ones
    latency: Latency | None = None  # None: no request ended in the last minute
    requests: RequestTotals = RequestTotals()
    release: str = ""  # of this router; empty: before 0.2.0
    protocol: int = 0  # the newest that it speaks; 0: likewise
    model_version: str = ""  # of the weights that new requests are answered by; empty: not known


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker that was considered; `terms` are the known and weighed values, by name.

    Of the workers of a role that have a `cost` among their terms, the cheapest was taken, equal ones in turn.
    """

    worker_id: str
    endpoint: str  # host:port
    role: Role
    chosen: bool
    excluded: str  # why it could not be chosen; empty where it could
    terms: Mapping[str, float]
    cost_terms: tuple[str, ...] = ()  # those of `terms` that the cost is the sum of


@dataclass(frozen=True, slots=True)
class ExplainedAttempt:
    candidates: tuple[Candidate, ...]
    policy: str
    reason: str
    queue_ms: float
    predicted: Mapping[str, float]
    actual: Mapping[str, float]
    transport: str  # of the KV; empty where it did not have to travel
    failure: str  # why this attempt came to nothing; empty where it did not
    failed_endpoint: str


@dataclass(frozen=True, slots=True)
class RequestExplanation:
    request_id: str
    age_s: float  # since its arrival
    prompt_tokens: int
    status: str
    attempts: tuple[ExplainedAttempt, ...]
    ttft_ms: float
    total_ms: float
    tbt_p50_ms: float
    tbt_p99_ms: float
    session_id: str = ""  # as the client named it; empty: it was of no session


@dataclass(frozen=True, slots=True)
class RequestStages:
    """Milliseconds; 0 for a stage that the request has not come to."""

    ttft_ms: float  # from arrival to the first token: the sum of the next six
    router_queue_ms: float
    route_ms: float
    prefill_fetch_ms: float
    prefill_queue_ms: float
    prefill_ms: float
    return_ms: float
    token_gap_ms: float  # from token 1 to token 2: about the sum of the next four
    recovery_ms: float
    transfer_exposed_ms: float
    decode_admission_ms: float
    first_step_ms: float
    total_ms: float  # from arrival to the end, or until now


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """Between the tokens of one request."""

    p50_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class StallCausePart:
    cause: str  # such as prompt_tokens
    ms: float
    culprit: str  # id of the request to blame; empty where there is none
    detail: str  # how many tokens, blocks or answers; the worker that was lost


@dataclass(frozen=True, slots=True)
class RequestStall:
    """A gap between two tokens that stands out."""

    at_ms: float  # its end, since the request's arrival
    gap_ms: float
    usual_ms: float  # what such a gap takes otherwise
    causes: tuple[StallCausePart, ...]  # longest first
    choice: int = 0


@dataclass(frozen=True, slots=True)
class RequestDrafts:
    """Of speculative decoding: tokens that were computed beside the newest ones of an answer."""

    drafted_tokens: int
    accepted_tokens: int  # of those, the ones that were drawn
    saved_ms: float  # by which the answer came sooner, as far as its worker knows; negative: later


@dataclass(frozen=True, slots=True)
class RecentRequest:
    """One of the newest requests of a router, which runs or has ended."""

    request_id: str  # empty where it was refused before it had one
    trace_id: str
    model: str
    phase: str  # queued, prefill or decode while it runs; then answered, cancelled, refused or failed
    reason: str  # why it was not answered, in one word
    prefill: str  # name of the worker; empty where decode computed the prompt
    decode: str  # empty where none was chosen
    attempts: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    age_s: float  # since its arrival
    stages: RequestStages
    tbt: TokenTimes | None  # None before the third token
    stalls: tuple[RequestStall, ...]  # the longest, in order of time; of a running one only where it was named
    stall_count: int
    drafts: RequestDrafts | None = None  # None: none of its steps had any


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """A LoRA adapter of a cluster."""

    name: str
    digest: str  # of what it computes, in hex
    path: str  # of its folder, as workers see it; empty of one that workers were started with
    started: bool  # workers were started with it, and keep it
    retired: bool  # unloaded or replaced, and requests still run with it
    worker_ids: tuple[str, ...]  # that have it
    missing: Mapping[str, str]  # why, by the worker of the model that does not have it; empty: it loads it now
