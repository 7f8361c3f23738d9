from baton.protos import report_pb2 as _report_pb2
from baton.protos import session_pb2 as _session_pb2
from baton.protos import timeline_pb2 as _timeline_pb2
from baton.protos import versions_pb2 as _versions_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReloadRequest(_message.Message):
    __slots__ = ("path", "grace_s")
    PATH_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    path: str
    grace_s: float
    def __init__(self, path: _Optional[str] = ..., grace_s: _Optional[float] = ...) -> None: ...

class ReloadResponse(_message.Message):
    __slots__ = ("version", "worker_ids")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    version: str
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[str] = ..., worker_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "replace")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    replace: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., replace: bool = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("digest", "worker_ids")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, digest: _Optional[str] = ..., worker_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name", "wait_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    wait_s: float
    def __init__(self, name: _Optional[str] = ..., wait_s: _Optional[float] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ("worker_ids",)
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterStatus]
    def __init__(self, adapters: _Optional[_Iterable[_Union[AdapterStatus, _Mapping]]] = ...) -> None: ...

class AdapterStatus(_message.Message):
    __slots__ = ("name", "digest", "path", "started", "retired", "worker_ids", "missing")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    RETIRED_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    path: str
    started: bool
    retired: bool
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    missing: _containers.RepeatedCompositeFieldContainer[MissingAdapter]
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., path: _Optional[str] = ..., started: bool = ..., retired: bool = ..., worker_ids: _Optional[_Iterable[str]] = ..., missing: _Optional[_Iterable[_Union[MissingAdapter, _Mapping]]] = ...) -> None: ...

class MissingAdapter(_message.Message):
    __slots__ = ("worker_id", "why")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    why: str
    def __init__(self, worker_id: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("ready", "detail", "registry_connected", "workers", "active_requests", "queued_requests", "other_routers", "planner", "indexed_blocks", "routers", "requests", "latency", "versions", "model_version", "tool_format")
    READY_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    OTHER_ROUTERS_FIELD_NUMBER: _ClassVar[int]
    PLANNER_FIELD_NUMBER: _ClassVar[int]
    INDEXED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LATENCY_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOOL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    detail: str
    registry_connected: bool
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    active_requests: int
    queued_requests: int
    other_routers: int
    planner: PlannerStatus
    indexed_blocks: int
    routers: _containers.RepeatedCompositeFieldContainer[RouterStatus]
    requests: RequestTotals
    latency: LatencyStatus
    versions: _versions_pb2.Versions
    model_version: str
    tool_format: str
    def __init__(self, ready: bool = ..., detail: _Optional[str] = ..., registry_connected: bool = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., active_requests: _Optional[int] = ..., queued_requests: _Optional[int] = ..., other_routers: _Optional[int] = ..., planner: _Optional[_Union[PlannerStatus, _Mapping]] = ..., indexed_blocks: _Optional[int] = ..., routers: _Optional[_Iterable[_Union[RouterStatus, _Mapping]]] = ..., requests: _Optional[_Union[RequestTotals, _Mapping]] = ..., latency: _Optional[_Union[LatencyStatus, _Mapping]] = ..., versions: _Optional[_Union[_versions_pb2.Versions, _Mapping]] = ..., model_version: _Optional[str] = ..., tool_format: _Optional[str] = ...) -> None: ...

class RequestTotals(_message.Message):
    __slots__ = ("started", "ended", "prompt_tokens", "generated_tokens")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    started: int
    ended: _containers.RepeatedCompositeFieldContainer[EndedRequests]
    prompt_tokens: int
    generated_tokens: int
    def __init__(self, started: _Optional[int] = ..., ended: _Optional[_Iterable[_Union[EndedRequests, _Mapping]]] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ...) -> None: ...

class EndedRequests(_message.Message):
    __slots__ = ("outcome", "reason", "count")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    outcome: str
    reason: str
    count: int
    def __init__(self, outcome: _Optional[str] = ..., reason: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class LatencyStatus(_message.Message):
    __slots__ = ("requests", "ttft", "tbt")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TTFT_FIELD_NUMBER: _ClassVar[int]
    TBT_FIELD_NUMBER: _ClassVar[int]
    requests: int
    ttft: Quantiles
    tbt: Quantiles
    def __init__(self, requests: _Optional[int] = ..., ttft: _Optional[_Union[Quantiles, _Mapping]] = ..., tbt: _Optional[_Union[Quantiles, _Mapping]] = ...) -> None: ...

class Quantiles(_message.Message):
    __slots__ = ("p50_ms", "p99_ms")
    P50_MS_FIELD_NUMBER: _ClassVar[int]
    P99_MS_FIELD_NUMBER: _ClassVar[int]
    p50_ms: float
    p99_ms: float
    def __init__(self, p50_ms: _Optional[float] = ..., p99_ms: _Optional[float] = ...) -> None: ...

class RouterStatus(_message.Message):
    __slots__ = ("router_id", "address", "uptime_s", "requests", "tokens", "versions")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    router_id: bytes
    address: str
    uptime_s: float
    requests: int
    tokens: int
    versions: _versions_pb2.Versions
    def __init__(self, router_id: _Optional[bytes] = ..., address: _Optional[str] = ..., uptime_s: _Optional[float] = ..., requests: _Optional[int] = ..., tokens: _Optional[int] = ..., versions: _Optional[_Union[_versions_pb2.Versions, _Mapping]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker", "endpoint", "connected", "epoch", "report", "in_flight_requests", "cache_view", "deaths", "drains", "role_changes", "lost_sessions", "tbt", "tier_view", "refused")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CACHE_VIEW_FIELD_NUMBER: _ClassVar[int]
    DEATHS_FIELD_NUMBER: _ClassVar[int]
    DRAINS_FIELD_NUMBER: _ClassVar[int]
    ROLE_CHANGES_FIELD_NUMBER: _ClassVar[int]
    LOST_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TBT_FIELD_NUMBER: _ClassVar[int]
    TIER_VIEW_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    worker: _session_pb2.WorkerInfo
    endpoint: str
    connected: bool
    epoch: int
    report: _report_pb2.Report
    in_flight_requests: int
    cache_view: CacheViewStatus
    deaths: int
    drains: int
    role_changes: int
    lost_sessions: int
    tbt: Quantiles
    tier_view: TierViewStatus
    refused: str
    def __init__(self, worker: _Optional[_Union[_session_pb2.WorkerInfo, _Mapping]] = ..., endpoint: _Optional[str] = ..., connected: bool = ..., epoch: _Optional[int] = ..., report: _Optional[_Union[_report_pb2.Report, _Mapping]] = ..., in_flight_requests: _Optional[int] = ..., cache_view: _Optional[_Union[CacheViewStatus, _Mapping]] = ..., deaths: _Optional[int] = ..., drains: _Optional[int] = ..., role_changes: _Optional[int] = ..., lost_sessions: _Optional[int] = ..., tbt: _Optional[_Union[Quantiles, _Mapping]] = ..., tier_view: _Optional[_Union[TierViewStatus, _Mapping]] = ..., refused: _Optional[str] = ...) -> None: ...

class PlannerStatus(_message.Message):
    __slots__ = ("mode", "prefill_pressure", "decode_pressure", "verdict", "changes", "desired_prefill_workers", "desired_decode_workers")
    MODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    DECODE_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    DESIRED_PREFILL_WORKERS_FIELD_NUMBER: _ClassVar[int]
    DESIRED_DECODE_WORKERS_FIELD_NUMBER: _ClassVar[int]
    mode: str
    prefill_pressure: float
    decode_pressure: float
    verdict: str
    changes: int
    desired_prefill_workers: int
    desired_decode_workers: int
    def __init__(self, mode: _Optional[str] = ..., prefill_pressure: _Optional[float] = ..., decode_pressure: _Optional[float] = ..., verdict: _Optional[str] = ..., changes: _Optional[int] = ..., desired_prefill_workers: _Optional[int] = ..., desired_decode_workers: _Optional[int] = ...) -> None: ...

class ChangeRoleRequest(_message.Message):
    __slots__ = ("worker_id", "role")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: _session_pb2.Role
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[_session_pb2.Role, str]] = ...) -> None: ...

class ChangeRoleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("request_id", "age_s", "prompt_tokens", "status", "attempts", "ttft_ms", "total_ms", "tbt_p50_ms", "tbt_p99_ms", "session_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    TBT_P50_MS_FIELD_NUMBER: _ClassVar[int]
    TBT_P99_MS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    age_s: float
    prompt_tokens: int
    status: str
    attempts: _containers.RepeatedCompositeFieldContainer[ExplainedAttempt]
    ttft_ms: float
    total_ms: float
    tbt_p50_ms: float
    tbt_p99_ms: float
    session_id: str
    def __init__(self, request_id: _Optional[str] = ..., age_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., status: _Optional[str] = ..., attempts: _Optional[_Iterable[_Union[ExplainedAttempt, _Mapping]]] = ..., ttft_ms: _Optional[float] = ..., total_ms: _Optional[float] = ..., tbt_p50_ms: _Optional[float] = ..., tbt_p99_ms: _Optional[float] = ..., session_id: _Optional[str] = ...) -> None: ...

class ExplainedAttempt(_message.Message):
    __slots__ = ("candidates", "policy", "reason", "queue_ms", "predicted", "actual", "transport", "failure", "failed_endpoint")
    class PredictedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class ActualEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    ACTUAL_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    FAILED_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    candidates: _containers.RepeatedCompositeFieldContainer[ExplainedCandidate]
    policy: str
    reason: str
    queue_ms: float
    predicted: _containers.ScalarMap[str, float]
    actual: _containers.ScalarMap[str, float]
    transport: str
    failure: str
    failed_endpoint: str
    def __init__(self, candidates: _Optional[_Iterable[_Union[ExplainedCandidate, _Mapping]]] = ..., policy: _Optional[str] = ..., reason: _Optional[str] = ..., queue_ms: _Optional[float] = ..., predicted: _Optional[_Mapping[str, float]] = ..., actual: _Optional[_Mapping[str, float]] = ..., transport: _Optional[str] = ..., failure: _Optional[str] = ..., failed_endpoint: _Optional[str] = ...) -> None: ...

class ExplainedCandidate(_message.Message):
    __slots__ = ("worker_id", "endpoint", "role", "chosen", "excluded", "terms", "cost_terms")
    class TermsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    COST_TERMS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    endpoint: str
    role: _session_pb2.Role
    chosen: bool
    excluded: str
    terms: _containers.ScalarMap[str, float]
    cost_terms: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., endpoint: _Optional[str] = ..., role: _Optional[_Union[_session_pb2.Role, str]] = ..., chosen: bool = ..., excluded: _Optional[str] = ..., terms: _Optional[_Mapping[str, float]] = ..., cost_terms: _Optional[_Iterable[str]] = ...) -> None: ...

class CacheViewStatus(_message.Message):
    __slots__ = ("follows", "exact", "blocks", "sequence", "resyncs", "checked_requests", "equal_requests", "missing_tokens", "surplus_tokens", "drift")
    FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RESYNCS_FIELD_NUMBER: _ClassVar[int]
    CHECKED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    EQUAL_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MISSING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SURPLUS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRIFT_FIELD_NUMBER: _ClassVar[int]
    follows: bool
    exact: bool
    blocks: int
    sequence: int
    resyncs: int
    checked_requests: int
    equal_requests: int
    missing_tokens: int
    surplus_tokens: int
    drift: float
    def __init__(self, follows: bool = ..., exact: bool = ..., blocks: _Optional[int] = ..., sequence: _Optional[int] = ..., resyncs: _Optional[int] = ..., checked_requests: _Optional[int] = ..., equal_requests: _Optional[int] = ..., missing_tokens: _Optional[int] = ..., surplus_tokens: _Optional[int] = ..., drift: _Optional[float] = ...) -> None: ...

class TierViewStatus(_message.Message):
    __slots__ = ("follows", "folder_blocks", "directory_blocks", "directory_id")
    FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    FOLDER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    follows: bool
    folder_blocks: int
    directory_blocks: int
    directory_id: bytes
    def __init__(self, follows: bool = ..., folder_blocks: _Optional[int] = ..., directory_blocks: _Optional[int] = ..., directory_id: _Optional[bytes] = ...) -> None: ...

class GetTimelinesRequest(_message.Message):
    __slots__ = ("request_id", "last_ms", "with_inputs", "with_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_MS_FIELD_NUMBER: _ClassVar[int]
    WITH_INPUTS_FIELD_NUMBER: _ClassVar[int]
    WITH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    last_ms: int
    with_inputs: bool
    with_tokens: bool
    def __init__(self, request_id: _Optional[str] = ..., last_ms: _Optional[int] = ..., with_inputs: bool = ..., with_tokens: bool = ...) -> None: ...

class GetTimelinesResponse(_message.Message):
    __slots__ = ("process",)
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    process: ProcessTimeline
    def __init__(self, process: _Optional[_Union[ProcessTimeline, _Mapping]] = ...) -> None: ...

class ProcessTimeline(_message.Message):
    __slots__ = ("name", "role", "endpoint", "offset_us", "error_us", "failure", "timeline", "requests", "decided")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_US_FIELD_NUMBER: _ClassVar[int]
    ERROR_US_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: _session_pb2.Role
    endpoint: str
    offset_us: int
    error_us: int
    failure: str
    timeline: _timeline_pb2.GetTimelineResponse
    requests: _containers.RepeatedCompositeFieldContainer[RoutedRequest]
    decided: str
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[_session_pb2.Role, str]] = ..., endpoint: _Optional[str] = ..., offset_us: _Optional[int] = ..., error_us: _Optional[int] = ..., failure: _Optional[str] = ..., timeline: _Optional[_Union[_timeline_pb2.GetTimelineResponse, _Mapping]] = ..., requests: _Optional[_Iterable[_Union[RoutedRequest, _Mapping]]] = ..., decided: _Optional[str] = ...) -> None: ...

class RoutedRequest(_message.Message):
    __slots__ = ("request_id", "trace_id", "name", "status", "began_us", "ended_us", "stages", "stalls", "decided")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    BEGAN_US_FIELD_NUMBER: _ClassVar[int]
    ENDED_US_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    STALLS_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    trace_id: str
    name: str
    status: str
    began_us: int
    ended_us: int
    stages: _containers.RepeatedCompositeFieldContainer[RoutedStage]
    stalls: _containers.RepeatedCompositeFieldContainer[RoutedStall]
    decided: str
    def __init__(self, request_id: _Optional[str] = ..., trace_id: _Optional[str] = ..., name: _Optional[str] = ..., status: _Optional[str] = ..., began_us: _Optional[int] = ..., ended_us: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[RoutedStage, _Mapping]]] = ..., stalls: _Optional[_Iterable[_Union[RoutedStall, _Mapping]]] = ..., decided: _Optional[str] = ...) -> None: ...

class RoutedStage(_message.Message):
    __slots__ = ("name", "began_us", "ended_us")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BEGAN_US_FIELD_NUMBER: _ClassVar[int]
    ENDED_US_FIELD_NUMBER: _ClassVar[int]
    name: str
    began_us: int
    ended_us: int
    def __init__(self, name: _Optional[str] = ..., began_us: _Optional[int] = ..., ended_us: _Optional[int] = ...) -> None: ...

class RoutedStall(_message.Message):
    __slots__ = ("at_us", "gap_ms", "usual_ms", "causes")
    AT_US_FIELD_NUMBER: _ClassVar[int]
    GAP_MS_FIELD_NUMBER: _ClassVar[int]
    USUAL_MS_FIELD_NUMBER: _ClassVar[int]
    CAUSES_FIELD_NUMBER: _ClassVar[int]
    at_us: int
    gap_ms: float
    usual_ms: float
    causes: _containers.RepeatedCompositeFieldContainer[_session_pb2.GapCause]
    def __init__(self, at_us: _Optional[int] = ..., gap_ms: _Optional[float] = ..., usual_ms: _Optional[float] = ..., causes: _Optional[_Iterable[_Union[_session_pb2.GapCause, _Mapping]]] = ...) -> None: ...

class RecentRequestsRequest(_message.Message):
    __slots__ = ("limit", "request_id")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    limit: int
    request_id: str
    def __init__(self, limit: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class RecentRequestsResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RecentRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[RecentRequest, _Mapping]]] = ...) -> None: ...

class RecentRequest(_message.Message):
    __slots__ = ("request_id", "trace_id", "model", "phase", "reason", "prefill", "decode", "attempts", "prompt_tokens", "cached_tokens", "generated_tokens", "age_s", "stages", "tbt", "stalls", "stall_count", "drafts")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    TBT_FIELD_NUMBER: _ClassVar[int]
    STALLS_FIELD_NUMBER: _ClassVar[int]
    STALL_COUNT_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    trace_id: str
    model: str
    phase: str
    reason: str
    prefill: str
    decode: str
    attempts: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    age_s: float
    stages: RequestStages
    tbt: TokenTimes
    stalls: _containers.RepeatedCompositeFieldContainer[RequestStall]
    stall_count: int
    drafts: RequestDrafts
    def __init__(self, request_id: _Optional[str] = ..., trace_id: _Optional[str] = ..., model: _Optional[str] = ..., phase: _Optional[str] = ..., reason: _Optional[str] = ..., prefill: _Optional[str] = ..., decode: _Optional[str] = ..., attempts: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., age_s: _Optional[float] = ..., stages: _Optional[_Union[RequestStages, _Mapping]] = ..., tbt: _Optional[_Union[TokenTimes, _Mapping]] = ..., stalls: _Optional[_Iterable[_Union[RequestStall, _Mapping]]] = ..., stall_count: _Optional[int] = ..., drafts: _Optional[_Union[RequestDrafts, _Mapping]] = ...) -> None: ...

class RequestDrafts(_message.Message):
    __slots__ = ("drafted_tokens", "accepted_tokens", "saved_ms")
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAVED_MS_FIELD_NUMBER: _ClassVar[int]
    drafted_tokens: int
    accepted_tokens: int
    saved_ms: float
    def __init__(self, drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., saved_ms: _Optional[float] = ...) -> None: ...

class RequestStages(_message.Message):
    __slots__ = ("ttft_ms", "router_queue_ms", "route_ms", "prefill_fetch_ms", "prefill_queue_ms", "prefill_ms", "return_ms", "token_gap_ms", "recovery_ms", "transfer_exposed_ms", "decode_admission_ms", "first_step_ms", "total_ms")
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    ROUTE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FETCH_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    RETURN_MS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_GAP_MS_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_EXPOSED_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADMISSION_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    ttft_ms: float
    router_queue_ms: float
    route_ms: float
    prefill_fetch_ms: float
    prefill_queue_ms: float
    prefill_ms: float
    return_ms: float
    token_gap_ms: float
    recovery_ms: float
    transfer_exposed_ms: float
    decode_admission_ms: float
    first_step_ms: float
    total_ms: float
    def __init__(self, ttft_ms: _Optional[float] = ..., router_queue_ms: _Optional[float] = ..., route_ms: _Optional[float] = ..., prefill_fetch_ms: _Optional[float] = ..., prefill_queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., return_ms: _Optional[float] = ..., token_gap_ms: _Optional[float] = ..., recovery_ms: _Optional[float] = ..., transfer_exposed_ms: _Optional[float] = ..., decode_admission_ms: _Optional[float] = ..., first_step_ms: _Optional[float] = ..., total_ms: _Optional[float] = ...) -> None: ...

class TokenTimes(_message.Message):
    __slots__ = ("p50_ms", "p99_ms", "max_ms")
    P50_MS_FIELD_NUMBER: _ClassVar[int]
    P99_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_MS_FIELD_NUMBER: _ClassVar[int]
    p50_ms: float
    p99_ms: float
    max_ms: float
    def __init__(self, p50_ms: _Optional[float] = ..., p99_ms: _Optional[float] = ..., max_ms: _Optional[float] = ...) -> None: ...

class RequestStall(_message.Message):
    __slots__ = ("at_ms", "gap_ms", "usual_ms", "causes", "choice")
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    GAP_MS_FIELD_NUMBER: _ClassVar[int]
    USUAL_MS_FIELD_NUMBER: _ClassVar[int]
    CAUSES_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    at_ms: float
    gap_ms: float
    usual_ms: float
    causes: _containers.RepeatedCompositeFieldContainer[RequestStallCause]
    choice: int
    def __init__(self, at_ms: _Optional[float] = ..., gap_ms: _Optional[float] = ..., usual_ms: _Optional[float] = ..., causes: _Optional[_Iterable[_Union[RequestStallCause, _Mapping]]] = ..., choice: _Optional[int] = ...) -> None: ...

class RequestStallCause(_message.Message):
    __slots__ = ("cause", "ms", "culprit", "detail")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    MS_FIELD_NUMBER: _ClassVar[int]
    CULPRIT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    cause: str
    ms: float
    culprit: str
    detail: str
    def __init__(self, cause: _Optional[str] = ..., ms: _Optional[float] = ..., culprit: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class WhyRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class WhyResponse(_message.Message):
    __slots__ = ("placed", "stages", "stalls", "stall_count", "longest_gap_ms", "cache", "colocated", "drafts", "not_acted_upon", "prompt_change")
    PLACED_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    STALLS_FIELD_NUMBER: _ClassVar[int]
    STALL_COUNT_FIELD_NUMBER: _ClassVar[int]
    LONGEST_GAP_MS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    COLOCATED_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NOT_ACTED_UPON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CHANGE_FIELD_NUMBER: _ClassVar[int]
    placed: ExplainResponse
    stages: RequestStages
    stalls: _containers.RepeatedCompositeFieldContainer[RequestStall]
    stall_count: int
    longest_gap_ms: float
    cache: CacheAutopsy
    colocated: ColocatedPrefill
    drafts: RequestDrafts
    not_acted_upon: _containers.RepeatedScalarFieldContainer[str]
    prompt_change: PromptChange
    def __init__(self, placed: _Optional[_Union[ExplainResponse, _Mapping]] = ..., stages: _Optional[_Union[RequestStages, _Mapping]] = ..., stalls: _Optional[_Iterable[_Union[RequestStall, _Mapping]]] = ..., stall_count: _Optional[int] = ..., longest_gap_ms: _Optional[float] = ..., cache: _Optional[_Union[CacheAutopsy, _Mapping]] = ..., colocated: _Optional[_Union[ColocatedPrefill, _Mapping]] = ..., drafts: _Optional[_Union[RequestDrafts, _Mapping]] = ..., not_acted_upon: _Optional[_Iterable[str]] = ..., prompt_change: _Optional[_Union[PromptChange, _Mapping]] = ...) -> None: ...

class PromptChange(_message.Message):
    __slots__ = ("token", "text")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    token: int
    text: str
    def __init__(self, token: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class CacheAutopsy(_message.Message):
    __slots__ = ("worker_id", "attempt", "block_tokens", "runs", "known_s", "expected_blocks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_S_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    attempt: int
    block_tokens: int
    runs: _containers.RepeatedCompositeFieldContainer[BlockRun]
    known_s: float
    expected_blocks: int
    def __init__(self, worker_id: _Optional[str] = ..., attempt: _Optional[int] = ..., block_tokens: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[BlockRun, _Mapping]]] = ..., known_s: _Optional[float] = ..., expected_blocks: _Optional[int] = ...) -> None: ...

class BlockRun(_message.Message):
    __slots__ = ("first_block", "blocks", "fate", "worker_id", "least_age_s", "most_age_s")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FATE_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LEAST_AGE_S_FIELD_NUMBER: _ClassVar[int]
    MOST_AGE_S_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    blocks: int
    fate: str
    worker_id: str
    least_age_s: float
    most_age_s: float
    def __init__(self, first_block: _Optional[int] = ..., blocks: _Optional[int] = ..., fate: _Optional[str] = ..., worker_id: _Optional[str] = ..., least_age_s: _Optional[float] = ..., most_age_s: _Optional[float] = ...) -> None: ...

class ColocatedPrefill(_message.Message):
    __slots__ = ("worker_id", "is_local", "basis", "ttft_ms", "wait_ms", "measured_ttft_ms", "prompt_tokens", "answers", "answers_gap_ms", "checked_requests", "median_error", "median_ratio", "checked_tokens")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    IS_LOCAL_FIELD_NUMBER: _ClassVar[int]
    BASIS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_GAP_MS_FIELD_NUMBER: _ClassVar[int]
    CHECKED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_ERROR_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_RATIO_FIELD_NUMBER: _ClassVar[int]
    CHECKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    is_local: bool
    basis: str
    ttft_ms: float
    wait_ms: float
    measured_ttft_ms: float
    prompt_tokens: int
    answers: int
    answers_gap_ms: float
    checked_requests: int
    median_error: float
    median_ratio: float
    checked_tokens: int
    def __init__(self, worker_id: _Optional[str] = ..., is_local: bool = ..., basis: _Optional[str] = ..., ttft_ms: _Optional[float] = ..., wait_ms: _Optional[float] = ..., measured_ttft_ms: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., answers: _Optional[int] = ..., answers_gap_ms: _Optional[float] = ..., checked_requests: _Optional[int] = ..., median_error: _Optional[float] = ..., median_ratio: _Optional[float] = ..., checked_tokens: _Optional[int] = ...) -> None: ...
