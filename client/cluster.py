"""The operator's view of a cluster: workers, KV blocks, load, requests, placement."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from baton.client.types import Model

Role: TypeAlias = Literal["prefill", "decode", "unknown"]


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Blocks of one KV pool: free + cached + held == total, held_by_sequences + held_by_transfers == held."""

    total: int
    free: int
    cached: int  # unused, in the prefix cache until evicted
    held: int
    held_by_sequences: int
    held_by_transfers: int


@dataclass(frozen=True, slots=True)
class Link:
    """Transport by which a worker reads KV from another one."""

    endpoint: str  # host:port of the other worker
    transport: str  # shared_memory, cuda_ipc, nixl, nccl, gloo, tcp or grpc
    gb_per_s: float  # throughput, measured when the workers connected
    fallback: str  # why no faster transport is used; empty for the fastest


@dataclass(frozen=True, slots=True)
class Load:
    """State of a worker in its newest report to this router."""

    limit_blocks: int  # maximum number of the worker's blocks that this router may commit
    limit_slots: int  # maximum number of sequences that this router may run on the worker
    pages: PageCounts
    waiting_requests: int
    running_sequences: int
    pending_tokens: int  # prompt tokens not computed yet
    draining: bool
    steps: int
    cache_query_tokens: int = 0  # tokens looked up in the prefix cache since the worker's start
    cache_hit_tokens: int = 0  # tokens found in the prefix cache since the worker's start
    preemptions: int = 0  # preempted sequences since the worker's start
    unfilled_slots: int = 0  # free token slots in held blocks: internal fragmentation
    links: tuple[Link, ...] = ()  # one per worker from which it reads KV
    checked_blocks: int = 0  # received blocks compared by checksum since the worker's start
    checksum_mismatches: int = 0  # received blocks with a wrong checksum, discarded and recomputed


@dataclass(frozen=True, slots=True)
class CacheView:
    """A router's view of a worker's prefix cache, and its accuracy."""

    follows: bool  # True: built from the worker's events; False: guessed from the prompts sent to it
    exact: bool  # whether the view's checksum equals the checksum in the worker's newest report
    blocks: int  # known blocks of the worker
    sequence: int  # sequence number of the newest applied events
    resyncs: int  # snapshots requested after missing or wrong events
    checked_requests: int  # requests whose predicted and actual cached tokens are known
    equal_requests: int  # checked requests whose prediction was right
    missing_tokens: int  # predicted tokens that were not cached
    surplus_tokens: int  # cached tokens that were not predicted
    drift: float  # share of the newest 64 checked requests whose prediction was wrong


@dataclass(frozen=True, slots=True)
class TierView:
    """A router's view of a worker's KV files."""

    follows: bool  # whether the view is built from the worker's events
    folder_blocks: int  # known blocks in its own files
    directory_blocks: int  # distinct blocks in the files of all workers of its directory
    directory_id: str  # hexadecimal; workers with the same id read each other's files


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
    fingerprint: str  # hexadecimal; only workers with equal fingerprints exchange KV
    model: Model
    model_path: str
    total_blocks: int
    total_slots: int
    in_flight_requests: int  # in-flight requests of this router on the worker
    load: Load | None  # None before the first report
    roles: tuple[Role, ...] = ()  # roles that it can change to; empty if its role is fixed
    arithmetic: str = ""  # CPU workers with equal values compute equal bits; empty from releases without this field
    cache_view: CacheView | None = None  # None if the worker never connected
    tier_view: TierView | None = None  # None if the worker has no open KV files
    deaths: int = 0  # processes of this name that disappeared without draining
    drains: int = 0  # processes of this name that drained and exited
    role_changes: int = 0
    lost_sessions: int = 0  # links lost to silence, or not reconnected in time
    tbt: Quantiles | None = None  # time between tokens of the newest answers; None if no answer was long enough
    refused: str = ""  # why a live worker gets no requests; empty if it may get them
    release: str = ""  # release of the worker; empty if unknown or before 0.2.0
    protocol: int = 0  # newest protocol version that it speaks; 0 before release 0.2.0
    kv_layout: str = ""  # description of the KV layout; only workers with equal layouts exchange KV


@dataclass(frozen=True, slots=True)
class PlannerStatus:
    """State of the role planner. Pressure of a role: its load divided by the highest load that meets the SLOs."""

    mode: str  # propose or act
    prefill_pressure: float
    decode_pressure: float
    verdict: str  # decision of the planner, in words
    changes: int  # role changes since the router's start
    desired_prefill_workers: int = 0  # number that the planner wants; 0 if no worker had that role yet
    desired_decode_workers: int = 0


@dataclass(frozen=True, slots=True)
class RouterStatus:
    """State of another router of the cluster."""

    router_id: str  # hexadecimal
    address: str  # host:port of its public gRPC
    uptime_s: float
    requests: int  # its in-flight requests on the workers
    tokens: int  # tokens of those requests
    release: str = ""  # release of that router; empty before 0.2.0


@dataclass(frozen=True, slots=True)
class Latency:
    """Latency of the requests that finished on this router in the last minute."""

    requests: int  # number of requests, at most 256
    ttft: Quantiles
    tbt: Quantiles | None  # None if no answer was long enough


@dataclass(frozen=True, slots=True)
class EndedRequests:
    outcome: str  # answered, cancelled, refused or failed
    reason: str  # why they were not answered, in one word; empty if they were
    count: int


@dataclass(frozen=True, slots=True)
class RequestTotals:
    """Counts of a router's requests since its start, running ones included."""

    started: int = 0
    ended: tuple[EndedRequests, ...] = ()
    prompt_tokens: int = 0  # tokens of dispatched prompts
    generated_tokens: int = 0  # tokens sent to clients


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    ready: bool
    detail: str  # why not ready or degraded; empty if healthy
    registry_connected: bool
    active_requests: int
    queued_requests: int  # active requests that wait for placement
    workers: tuple[WorkerStatus, ...]
    other_routers: int = 0  # routers whose load this router knows
    planner: PlannerStatus | None = None  # None without a planner
    indexed_blocks: int = 0  # distinct KV blocks known on any worker
    routers: tuple[RouterStatus, ...] = ()  # the other routers
    latency: Latency | None = None  # None if no request finished in the last minute
    requests: RequestTotals = RequestTotals()
    release: str = ""  # release of this router; empty before 0.2.0
    protocol: int = 0  # newest protocol version that it speaks; 0 before release 0.2.0
    model_version: str = ""  # version of the weights for new requests; empty if unknown
    tool_format: str = ""  # format of tool calls; generic: the chat template shows no tools; empty if unknown


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker considered for a request. `terms`: values that are known about it, by name.

    Among the workers of a role that have a `cost` term, the cheapest is chosen; equally cheap ones take turns.
    """

    worker_id: str
    endpoint: str  # host:port
    role: Role
    chosen: bool
    excluded: str  # why it could not be chosen; empty if it could
    terms: Mapping[str, float]
    cost_terms: tuple[str, ...] = ()  # names of the terms that add up to the cost


@dataclass(frozen=True, slots=True)
class ExplainedAttempt:
    candidates: tuple[Candidate, ...]
    policy: str
    reason: str
    queue_ms: float
    predicted: Mapping[str, float]
    actual: Mapping[str, float]
    transport: str  # transport of the KV; empty without a transfer
    failure: str  # why this attempt failed; empty if it did not
    failed_endpoint: str


@dataclass(frozen=True, slots=True)
class RequestExplanation:
    request_id: str
    age_s: float  # time since arrival
    prompt_tokens: int
    status: str
    attempts: tuple[ExplainedAttempt, ...]
    ttft_ms: float
    total_ms: float
    tbt_p50_ms: float
    tbt_p99_ms: float
    session_id: str = ""  # session id from the client; empty without a session


@dataclass(frozen=True, slots=True)
class RequestStages:
    """Milliseconds per stage; 0 for a stage that the request has not reached."""

    ttft_ms: float  # arrival to first token: the sum of router_queue_ms to return_ms
    router_queue_ms: float
    route_ms: float
    prefill_fetch_ms: float
    prefill_queue_ms: float
    prefill_ms: float
    return_ms: float
    token_gap_ms: float  # token 1 to token 2: about the sum of recovery_ms to first_step_ms
    recovery_ms: float
    transfer_exposed_ms: float
    decode_admission_ms: float
    first_step_ms: float
    total_ms: float  # arrival to the end of the request, or to now while it runs


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """Times between the tokens of one request."""

    p50_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class StallCausePart:
    cause: str  # for example prompt_tokens
    ms: float
    culprit: str  # id of the responsible request; empty without one
    detail: str  # number of tokens, blocks or answers; or the lost worker


@dataclass(frozen=True, slots=True)
class RequestStall:
    """An unusually long gap between two tokens."""

    at_ms: float  # end of the gap, from the request's arrival
    gap_ms: float
    usual_ms: float  # usual length of such a gap
    causes: tuple[StallCausePart, ...]  # longest first
    choice: int = 0


@dataclass(frozen=True, slots=True)
class RequestDrafts:
    """Draft tokens of one request, from speculative decoding."""

    drafted_tokens: int
    accepted_tokens: int  # drafted tokens that became part of the answer
    saved_ms: float  # estimated time saved; negative if the answer came later


@dataclass(frozen=True, slots=True)
class RecentRequest:
    """A running or finished request among a router's newest."""

    request_id: str  # empty if rejected before it had an id
    trace_id: str
    model: str
    phase: str  # queued, prefill or decode; then answered, cancelled, refused or failed
    reason: str  # why it was not answered, in one word
    prefill: str  # prefill worker; empty if the decode worker computed the prompt
    decode: str  # decode worker; empty before placement
    attempts: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    age_s: float  # time since arrival
    stages: RequestStages
    tbt: TokenTimes | None  # None before the third token
    stalls: tuple[RequestStall, ...]  # longest stalls, in order of time
    stall_count: int
    drafts: RequestDrafts | None = None  # None without drafts


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """A LoRA adapter of a cluster."""

    name: str
    digest: str  # digest of its weights and of the settings that affect results, hexadecimal
    path: str  # folder as workers see it; empty for adapters from the workers' command line
    started: bool  # True for an adapter from the workers' command line, which is never unloaded
    retired: bool  # unloaded or replaced, but still used by running requests
    worker_ids: tuple[str, ...]  # workers that have it
    missing: Mapping[str, str]  # by id of a worker without it: the reason, empty while the adapter loads
