from baton.protos import report_pb2 as _report_pb2
from baton.protos import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("ready", "detail", "registry_connected", "workers", "active_requests", "queued_requests", "other_routers", "planner", "indexed_blocks", "routers", "requests", "latency")
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
    def __init__(self, ready: bool = ..., detail: _Optional[str] = ..., registry_connected: bool = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., active_requests: _Optional[int] = ..., queued_requests: _Optional[int] = ..., other_routers: _Optional[int] = ..., planner: _Optional[_Union[PlannerStatus, _Mapping]] = ..., indexed_blocks: _Optional[int] = ..., routers: _Optional[_Iterable[_Union[RouterStatus, _Mapping]]] = ..., requests: _Optional[_Union[RequestTotals, _Mapping]] = ..., latency: _Optional[_Union[LatencyStatus, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("router_id", "address", "uptime_s", "requests", "tokens")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    router_id: bytes
    address: str
    uptime_s: float
    requests: int
    tokens: int
    def __init__(self, router_id: _Optional[bytes] = ..., address: _Optional[str] = ..., uptime_s: _Optional[float] = ..., requests: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker", "endpoint", "connected", "epoch", "report", "in_flight_requests", "cache_view", "deaths", "drains", "role_changes", "lost_sessions")
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
    def __init__(self, worker: _Optional[_Union[_session_pb2.WorkerInfo, _Mapping]] = ..., endpoint: _Optional[str] = ..., connected: bool = ..., epoch: _Optional[int] = ..., report: _Optional[_Union[_report_pb2.Report, _Mapping]] = ..., in_flight_requests: _Optional[int] = ..., cache_view: _Optional[_Union[CacheViewStatus, _Mapping]] = ..., deaths: _Optional[int] = ..., drains: _Optional[int] = ..., role_changes: _Optional[int] = ..., lost_sessions: _Optional[int] = ...) -> None: ...

class PlannerStatus(_message.Message):
    __slots__ = ("mode", "prefill_pressure", "decode_pressure", "verdict", "changes")
    MODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    DECODE_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    mode: str
    prefill_pressure: float
    decode_pressure: float
    verdict: str
    changes: int
    def __init__(self, mode: _Optional[str] = ..., prefill_pressure: _Optional[float] = ..., decode_pressure: _Optional[float] = ..., verdict: _Optional[str] = ..., changes: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("request_id", "age_s", "prompt_tokens", "status", "attempts", "ttft_ms", "total_ms", "tbt_p50_ms", "tbt_p99_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    TBT_P50_MS_FIELD_NUMBER: _ClassVar[int]
    TBT_P99_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    age_s: float
    prompt_tokens: int
    status: str
    attempts: _containers.RepeatedCompositeFieldContainer[ExplainedAttempt]
    ttft_ms: float
    total_ms: float
    tbt_p50_ms: float
    tbt_p99_ms: float
    def __init__(self, request_id: _Optional[str] = ..., age_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., status: _Optional[str] = ..., attempts: _Optional[_Iterable[_Union[ExplainedAttempt, _Mapping]]] = ..., ttft_ms: _Optional[float] = ..., total_ms: _Optional[float] = ..., tbt_p50_ms: _Optional[float] = ..., tbt_p99_ms: _Optional[float] = ...) -> None: ...

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
