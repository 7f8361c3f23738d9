from baton.protos import cache_pb2 as _cache_pb2
from baton.protos import kept_session_pb2 as _kept_session_pb2
from baton.protos import report_pb2 as _report_pb2
from baton.protos import sampling_pb2 as _sampling_pb2
from baton.protos import versions_pb2 as _versions_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]

class PoolingKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_KIND_UNSPECIFIED: _ClassVar[PoolingKind]
    POOLING_KIND_LAST: _ClassVar[PoolingKind]
    POOLING_KIND_MEAN: _ClassVar[PoolingKind]
    POOLING_KIND_CLS: _ClassVar[PoolingKind]

class StallCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STALL_CAUSE_UNSPECIFIED: _ClassVar[StallCause]
    STALL_CAUSE_PROMPT_TOKENS: _ClassVar[StallCause]
    STALL_CAUSE_LARGER_BATCH: _ClassVar[StallCause]
    STALL_CAUSE_LONGER_CONTEXTS: _ClassVar[StallCause]
    STALL_CAUSE_BLOCK_COPIES: _ClassVar[StallCause]
    STALL_CAUSE_PREEMPTION: _ClassVar[StallCause]
    STALL_CAUSE_LATE_MASK: _ClassVar[StallCause]
    STALL_CAUSE_GARBAGE_COLLECTION: _ClassVar[StallCause]
    STALL_CAUSE_INTERPRETER_LOCK: _ClassVar[StallCause]
    STALL_CAUSE_CPU_WAIT: _ClassVar[StallCause]
    STALL_CAUSE_STOPPED: _ClassVar[StallCause]
    STALL_CAUSE_SLOWER_COMPUTATION: _ClassVar[StallCause]
    STALL_CAUSE_ENGINE_IDLE: _ClassVar[StallCause]
    STALL_CAUSE_WORKER_EVENT_LOOP: _ClassVar[StallCause]
    STALL_CAUSE_ROUTER_EVENT_LOOP: _ClassVar[StallCause]
    STALL_CAUSE_NETWORK: _ClassVar[StallCause]
    STALL_CAUSE_RECOVERY: _ClassVar[StallCause]
    STALL_CAUSE_DRAFTED_TOKENS: _ClassVar[StallCause]
    STALL_CAUSE_LENT_CORES: _ClassVar[StallCause]

class EndReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    END_REASON_UNSPECIFIED: _ClassVar[EndReason]
    END_REASON_STOP: _ClassVar[EndReason]
    END_REASON_LENGTH: _ClassVar[EndReason]

class FailureReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_REASON_UNSPECIFIED: _ClassVar[FailureReason]
    FAILURE_REASON_INVALID: _ClassVar[FailureReason]
    FAILURE_REASON_TRANSFER: _ClassVar[FailureReason]
    FAILURE_REASON_NONFINITE: _ClassVar[FailureReason]
    FAILURE_REASON_DEADLINE: _ClassVar[FailureReason]
    FAILURE_REASON_DRAINING: _ClassVar[FailureReason]
    FAILURE_REASON_NO_ROOM: _ClassVar[FailureReason]
    FAILURE_REASON_UNKNOWN_ATTEMPT: _ClassVar[FailureReason]
    FAILURE_REASON_CORRUPT: _ClassVar[FailureReason]
    FAILURE_REASON_ADOPTED: _ClassVar[FailureReason]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
POOLING_KIND_UNSPECIFIED: PoolingKind
POOLING_KIND_LAST: PoolingKind
POOLING_KIND_MEAN: PoolingKind
POOLING_KIND_CLS: PoolingKind
STALL_CAUSE_UNSPECIFIED: StallCause
STALL_CAUSE_PROMPT_TOKENS: StallCause
STALL_CAUSE_LARGER_BATCH: StallCause
STALL_CAUSE_LONGER_CONTEXTS: StallCause
STALL_CAUSE_BLOCK_COPIES: StallCause
STALL_CAUSE_PREEMPTION: StallCause
STALL_CAUSE_LATE_MASK: StallCause
STALL_CAUSE_GARBAGE_COLLECTION: StallCause
STALL_CAUSE_INTERPRETER_LOCK: StallCause
STALL_CAUSE_CPU_WAIT: StallCause
STALL_CAUSE_STOPPED: StallCause
STALL_CAUSE_SLOWER_COMPUTATION: StallCause
STALL_CAUSE_ENGINE_IDLE: StallCause
STALL_CAUSE_WORKER_EVENT_LOOP: StallCause
STALL_CAUSE_ROUTER_EVENT_LOOP: StallCause
STALL_CAUSE_NETWORK: StallCause
STALL_CAUSE_RECOVERY: StallCause
STALL_CAUSE_DRAFTED_TOKENS: StallCause
STALL_CAUSE_LENT_CORES: StallCause
END_REASON_UNSPECIFIED: EndReason
END_REASON_STOP: EndReason
END_REASON_LENGTH: EndReason
FAILURE_REASON_UNSPECIFIED: FailureReason
FAILURE_REASON_INVALID: FailureReason
FAILURE_REASON_TRANSFER: FailureReason
FAILURE_REASON_NONFINITE: FailureReason
FAILURE_REASON_DEADLINE: FailureReason
FAILURE_REASON_DRAINING: FailureReason
FAILURE_REASON_NO_ROOM: FailureReason
FAILURE_REASON_UNKNOWN_ATTEMPT: FailureReason
FAILURE_REASON_CORRUPT: FailureReason
FAILURE_REASON_ADOPTED: FailureReason

class ConnectRequest(_message.Message):
    __slots__ = ("number", "acknowledged", "hello", "prefill", "start", "cancel", "change_role", "snapshot_request", "adopt", "want", "commands", "bring", "prepare_adapter", "adapter_list", "clock", "repeat_ms")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    CHANGE_ROLE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_REQUEST_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    BRING_FIELD_NUMBER: _ClassVar[int]
    PREPARE_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LIST_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    REPEAT_MS_FIELD_NUMBER: _ClassVar[int]
    number: int
    acknowledged: int
    hello: Hello
    prefill: Prefill
    start: Start
    cancel: Cancel
    change_role: ChangeRole
    snapshot_request: _cache_pb2.SnapshotRequest
    adopt: Adopt
    want: Want
    commands: Commands
    bring: Bring
    prepare_adapter: PrepareAdapter
    adapter_list: AdapterList
    clock: Clock
    repeat_ms: int
    def __init__(self, number: _Optional[int] = ..., acknowledged: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., change_role: _Optional[_Union[ChangeRole, _Mapping]] = ..., snapshot_request: _Optional[_Union[_cache_pb2.SnapshotRequest, _Mapping]] = ..., adopt: _Optional[_Union[Adopt, _Mapping]] = ..., want: _Optional[_Union[Want, _Mapping]] = ..., commands: _Optional[_Union[Commands, _Mapping]] = ..., bring: _Optional[_Union[Bring, _Mapping]] = ..., prepare_adapter: _Optional[_Union[PrepareAdapter, _Mapping]] = ..., adapter_list: _Optional[_Union[AdapterList, _Mapping]] = ..., clock: _Optional[_Union[Clock, _Mapping]] = ..., repeat_ms: _Optional[int] = ...) -> None: ...

class Clock(_message.Message):
    __slots__ = ("echo_us", "kept_us", "wall_us")
    ECHO_US_FIELD_NUMBER: _ClassVar[int]
    KEPT_US_FIELD_NUMBER: _ClassVar[int]
    WALL_US_FIELD_NUMBER: _ClassVar[int]
    echo_us: int
    kept_us: int
    wall_us: int
    def __init__(self, echo_us: _Optional[int] = ..., kept_us: _Optional[int] = ..., wall_us: _Optional[int] = ...) -> None: ...

class Commands(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[ConnectRequest]
    def __init__(self, commands: _Optional[_Iterable[_Union[ConnectRequest, _Mapping]]] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("number", "acknowledged", "epoch", "welcome", "first_step", "step_outputs", "landed", "failed", "report", "prompt_scores", "cache_events", "cache_snapshot", "tier_events", "tier_snapshot", "hand_over", "adapter_prepared", "adapter_state")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    STEP_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    LANDED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SCORES_FIELD_NUMBER: _ClassVar[int]
    CACHE_EVENTS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    TIER_EVENTS_FIELD_NUMBER: _ClassVar[int]
    TIER_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_PREPARED_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_STATE_FIELD_NUMBER: _ClassVar[int]
    number: int
    acknowledged: int
    epoch: int
    welcome: Welcome
    first_step: FirstStep
    step_outputs: StepOutputs
    landed: Landed
    failed: Failed
    report: _report_pb2.Report
    prompt_scores: PromptScores
    cache_events: _cache_pb2.CacheEvents
    cache_snapshot: _cache_pb2.CacheSnapshot
    tier_events: _cache_pb2.TierEvents
    tier_snapshot: _cache_pb2.TierSnapshot
    hand_over: HandOver
    adapter_prepared: AdapterPrepared
    adapter_state: AdapterState
    def __init__(self, number: _Optional[int] = ..., acknowledged: _Optional[int] = ..., epoch: _Optional[int] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., first_step: _Optional[_Union[FirstStep, _Mapping]] = ..., step_outputs: _Optional[_Union[StepOutputs, _Mapping]] = ..., landed: _Optional[_Union[Landed, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., report: _Optional[_Union[_report_pb2.Report, _Mapping]] = ..., prompt_scores: _Optional[_Union[PromptScores, _Mapping]] = ..., cache_events: _Optional[_Union[_cache_pb2.CacheEvents, _Mapping]] = ..., cache_snapshot: _Optional[_Union[_cache_pb2.CacheSnapshot, _Mapping]] = ..., tier_events: _Optional[_Union[_cache_pb2.TierEvents, _Mapping]] = ..., tier_snapshot: _Optional[_Union[_cache_pb2.TierSnapshot, _Mapping]] = ..., hand_over: _Optional[_Union[HandOver, _Mapping]] = ..., adapter_prepared: _Optional[_Union[AdapterPrepared, _Mapping]] = ..., adapter_state: _Optional[_Union[AdapterState, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("router_id", "received", "resumes_epoch", "versions")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    RESUMES_EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    router_id: bytes
    received: int
    resumes_epoch: int
    versions: _versions_pb2.Versions
    def __init__(self, router_id: _Optional[bytes] = ..., received: _Optional[int] = ..., resumes_epoch: _Optional[int] = ..., versions: _Optional[_Union[_versions_pb2.Versions, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("resumed", "received", "worker")
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    resumed: bool
    received: int
    worker: WorkerInfo
    def __init__(self, resumed: bool = ..., received: _Optional[int] = ..., worker: _Optional[_Union[WorkerInfo, _Mapping]] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "role", "pid", "fingerprint", "model", "total_blocks", "total_slots", "adapters", "roles", "pool_id", "arithmetic", "versions", "kv", "adapter_state")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SLOTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    ARITHMETIC_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_STATE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: Role
    pid: int
    fingerprint: bytes
    model: ModelInfo
    total_blocks: int
    total_slots: int
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    roles: _containers.RepeatedScalarFieldContainer[Role]
    pool_id: bytes
    arithmetic: str
    versions: _versions_pb2.Versions
    kv: _versions_pb2.KvContent
    adapter_state: AdapterState
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., pid: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., model: _Optional[_Union[ModelInfo, _Mapping]] = ..., total_blocks: _Optional[int] = ..., total_slots: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., roles: _Optional[_Iterable[_Union[Role, str]]] = ..., pool_id: _Optional[bytes] = ..., arithmetic: _Optional[str] = ..., versions: _Optional[_Union[_versions_pb2.Versions, _Mapping]] = ..., kv: _Optional[_Union[_versions_pb2.KvContent, _Mapping]] = ..., adapter_state: _Optional[_Union[AdapterState, _Mapping]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "digest", "path", "grace_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    path: str
    grace_s: float
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., path: _Optional[str] = ..., grace_s: _Optional[float] = ...) -> None: ...

class PrepareAdapter(_message.Message):
    __slots__ = ("change_id", "name", "path", "drop")
    CHANGE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    change_id: int
    name: str
    path: str
    drop: bool
    def __init__(self, change_id: _Optional[int] = ..., name: _Optional[str] = ..., path: _Optional[str] = ..., drop: bool = ...) -> None: ...

class AdapterPrepared(_message.Message):
    __slots__ = ("change_id", "digest", "refusal")
    CHANGE_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    change_id: int
    digest: str
    refusal: str
    def __init__(self, change_id: _Optional[int] = ..., digest: _Optional[str] = ..., refusal: _Optional[str] = ...) -> None: ...

class AdapterList(_message.Message):
    __slots__ = ("version", "adapters", "digests_in_use")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    version: int
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    digests_in_use: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., digests_in_use: _Optional[_Iterable[str]] = ...) -> None: ...

class AdapterState(_message.Message):
    __slots__ = ("version", "listed", "started", "usable", "refusals", "own_weights_freed")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LISTED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    USABLE_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    OWN_WEIGHTS_FREED_FIELD_NUMBER: _ClassVar[int]
    version: int
    listed: _containers.RepeatedCompositeFieldContainer[Adapter]
    started: _containers.RepeatedCompositeFieldContainer[Adapter]
    usable: _containers.RepeatedCompositeFieldContainer[Adapter]
    refusals: _containers.RepeatedCompositeFieldContainer[AdapterRefusal]
    own_weights_freed: bool
    def __init__(self, version: _Optional[int] = ..., listed: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., started: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., usable: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., refusals: _Optional[_Iterable[_Union[AdapterRefusal, _Mapping]]] = ..., own_weights_freed: bool = ...) -> None: ...

class AdapterRefusal(_message.Message):
    __slots__ = ("name", "why")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    name: str
    why: str
    def __init__(self, name: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "path", "max_model_len", "vocab_size", "dtype", "block_size", "makes_no_answers", "block_groups")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAKES_NO_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_GROUPS_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    max_model_len: int
    vocab_size: int
    dtype: str
    block_size: int
    makes_no_answers: bool
    block_groups: BlockGroups
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., makes_no_answers: bool = ..., block_groups: _Optional[_Union[BlockGroups, _Mapping]] = ...) -> None: ...

class BlockGroups(_message.Message):
    __slots__ = ("whole", "windowed", "window_tokens")
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    WINDOWED_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    whole: int
    windowed: int
    window_tokens: int
    def __init__(self, whole: _Optional[int] = ..., windowed: _Optional[int] = ..., window_tokens: _Optional[int] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("attempt_id", "transfer_id", "token_ids", "sampling", "block_hashes", "time_left_ms", "traceparent", "fetch", "adapter", "answered_tokens", "first_choice", "request_id", "kept_session", "adapter_digest", "pooling", "first_token_in_ms", "tbt_slo_ms", "ttft_slo_ms")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHOICE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KEPT_SESSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_IN_MS_FIELD_NUMBER: _ClassVar[int]
    TBT_SLO_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_MS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: int
    transfer_id: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _sampling_pb2.Sampling
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    time_left_ms: int
    traceparent: str
    fetch: Fetch
    adapter: str
    answered_tokens: int
    first_choice: int
    request_id: str
    kept_session: _kept_session_pb2.KeptSession
    adapter_digest: str
    pooling: Pooling
    first_token_in_ms: int
    tbt_slo_ms: int
    ttft_slo_ms: int
    def __init__(self, attempt_id: _Optional[int] = ..., transfer_id: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_sampling_pb2.Sampling, _Mapping]] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., time_left_ms: _Optional[int] = ..., traceparent: _Optional[str] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ..., adapter: _Optional[str] = ..., answered_tokens: _Optional[int] = ..., first_choice: _Optional[int] = ..., request_id: _Optional[str] = ..., kept_session: _Optional[_Union[_kept_session_pb2.KeptSession, _Mapping]] = ..., adapter_digest: _Optional[str] = ..., pooling: _Optional[_Union[Pooling, _Mapping]] = ..., first_token_in_ms: _Optional[int] = ..., tbt_slo_ms: _Optional[int] = ..., ttft_slo_ms: _Optional[int] = ...) -> None: ...

class Pooling(_message.Message):
    __slots__ = ("kind", "head_token_ids", "second_from")
    KIND_FIELD_NUMBER: _ClassVar[int]
    HEAD_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SECOND_FROM_FIELD_NUMBER: _ClassVar[int]
    kind: PoolingKind
    head_token_ids: _containers.RepeatedScalarFieldContainer[int]
    second_from: int
    def __init__(self, kind: _Optional[_Union[PoolingKind, str]] = ..., head_token_ids: _Optional[_Iterable[int]] = ..., second_from: _Optional[int] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("endpoint", "transfer_id", "blocks", "loaded_blocks", "load_bytes_per_s")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOAD_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    transfer_id: bytes
    blocks: int
    loaded_blocks: int
    load_bytes_per_s: float
    def __init__(self, endpoint: _Optional[str] = ..., transfer_id: _Optional[bytes] = ..., blocks: _Optional[int] = ..., loaded_blocks: _Optional[int] = ..., load_bytes_per_s: _Optional[float] = ...) -> None: ...

class HandOver(_message.Message):
    __slots__ = ("session", "block_hashes")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    session: _kept_session_pb2.KeptSession
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, session: _Optional[_Union[_kept_session_pb2.KeptSession, _Mapping]] = ..., block_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Bring(_message.Message):
    __slots__ = ("fetch", "block_hashes", "session")
    FETCH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    fetch: Fetch
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    session: _kept_session_pb2.KeptSession
    def __init__(self, fetch: _Optional[_Union[Fetch, _Mapping]] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., session: _Optional[_Union[_kept_session_pb2.KeptSession, _Mapping]] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("attempt_id", "transfer_id", "prefill_endpoint", "token_ids", "sampling", "block_hashes", "time_left_ms", "traceparent", "cache_root", "adapter", "answered_tokens", "first_choice", "request_id", "kept_session", "adapter_digest", "pooling", "first_token_in_ms", "tbt_slo_ms", "ttft_slo_ms", "tokens_together")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    CACHE_ROOT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHOICE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KEPT_SESSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_IN_MS_FIELD_NUMBER: _ClassVar[int]
    TBT_SLO_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_MS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_TOGETHER_FIELD_NUMBER: _ClassVar[int]
    attempt_id: int
    transfer_id: bytes
    prefill_endpoint: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _sampling_pb2.Sampling
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    time_left_ms: int
    traceparent: str
    cache_root: bytes
    adapter: str
    answered_tokens: int
    first_choice: int
    request_id: str
    kept_session: _kept_session_pb2.KeptSession
    adapter_digest: str
    pooling: Pooling
    first_token_in_ms: int
    tbt_slo_ms: int
    ttft_slo_ms: int
    tokens_together: int
    def __init__(self, attempt_id: _Optional[int] = ..., transfer_id: _Optional[bytes] = ..., prefill_endpoint: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_sampling_pb2.Sampling, _Mapping]] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., time_left_ms: _Optional[int] = ..., traceparent: _Optional[str] = ..., cache_root: _Optional[bytes] = ..., adapter: _Optional[str] = ..., answered_tokens: _Optional[int] = ..., first_choice: _Optional[int] = ..., request_id: _Optional[str] = ..., kept_session: _Optional[_Union[_kept_session_pb2.KeptSession, _Mapping]] = ..., adapter_digest: _Optional[str] = ..., pooling: _Optional[_Union[Pooling, _Mapping]] = ..., first_token_in_ms: _Optional[int] = ..., tbt_slo_ms: _Optional[int] = ..., ttft_slo_ms: _Optional[int] = ..., tokens_together: _Optional[int] = ...) -> None: ...

class Adopt(_message.Message):
    __slots__ = ("router_id", "attempt_id", "as_attempt_id", "time_left_ms")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    AS_ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    router_id: bytes
    attempt_id: int
    as_attempt_id: int
    time_left_ms: int
    def __init__(self, router_id: _Optional[bytes] = ..., attempt_id: _Optional[int] = ..., as_attempt_id: _Optional[int] = ..., time_left_ms: _Optional[int] = ...) -> None: ...

class ChangeRole(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: Role
    def __init__(self, role: _Optional[_Union[Role, str]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("attempt_id", "keep_landed")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    KEEP_LANDED_FIELD_NUMBER: _ClassVar[int]
    attempt_id: int
    keep_landed: bool
    def __init__(self, attempt_id: _Optional[int] = ..., keep_landed: bool = ...) -> None: ...

class Want(_message.Message):
    __slots__ = ("blocks", "slots")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    slots: int
    def __init__(self, blocks: _Optional[int] = ..., slots: _Optional[int] = ...) -> None: ...

class PromptScores(_message.Message):
    __slots__ = ("attempt_id", "offset", "logprobs", "top_token_ids", "top_logprobs")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: int
    offset: int
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, attempt_id: _Optional[int] = ..., offset: _Optional[int] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class FirstStep(_message.Message):
    __slots__ = ("attempt_id", "outputs", "timings", "pooled")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    attempt_id: int
    outputs: _containers.RepeatedCompositeFieldContainer[SequenceOutput]
    timings: PrefillTimings
    pooled: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, attempt_id: _Optional[int] = ..., outputs: _Optional[_Iterable[_Union[SequenceOutput, _Mapping]]] = ..., timings: _Optional[_Union[PrefillTimings, _Mapping]] = ..., pooled: _Optional[_Iterable[float]] = ...) -> None: ...

class PrefillTimings(_message.Message):
    __slots__ = ("queue_ms", "chunk_ms", "total_ms", "cached_tokens", "fetch_ms", "fetched_tokens", "fetch_bytes", "fetch_transport", "restore_ms", "restored_tokens")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCH_MS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCH_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCH_TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    RESTORE_MS_FIELD_NUMBER: _ClassVar[int]
    RESTORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    chunk_ms: _containers.RepeatedScalarFieldContainer[float]
    total_ms: float
    cached_tokens: int
    fetch_ms: float
    fetched_tokens: int
    fetch_bytes: int
    fetch_transport: str
    restore_ms: float
    restored_tokens: int
    def __init__(self, queue_ms: _Optional[float] = ..., chunk_ms: _Optional[_Iterable[float]] = ..., total_ms: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., fetch_ms: _Optional[float] = ..., fetched_tokens: _Optional[int] = ..., fetch_bytes: _Optional[int] = ..., fetch_transport: _Optional[str] = ..., restore_ms: _Optional[float] = ..., restored_tokens: _Optional[int] = ...) -> None: ...

class StepOutputs(_message.Message):
    __slots__ = ("outputs", "made_us", "held_us", "gaps", "held", "since", "drafts", "attempt_ids", "choices", "offsets", "token_ids")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    MADE_US_FIELD_NUMBER: _ClassVar[int]
    HELD_US_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[SequenceOutput]
    made_us: int
    held_us: int
    gaps: _containers.RepeatedCompositeFieldContainer[Gap]
    held: _containers.RepeatedCompositeFieldContainer[GapCause]
    since: _containers.RepeatedCompositeFieldContainer[GapCause]
    drafts: _containers.RepeatedCompositeFieldContainer[Drafts]
    attempt_ids: _containers.RepeatedScalarFieldContainer[int]
    choices: _containers.RepeatedScalarFieldContainer[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, outputs: _Optional[_Iterable[_Union[SequenceOutput, _Mapping]]] = ..., made_us: _Optional[int] = ..., held_us: _Optional[int] = ..., gaps: _Optional[_Iterable[_Union[Gap, _Mapping]]] = ..., held: _Optional[_Iterable[_Union[GapCause, _Mapping]]] = ..., since: _Optional[_Iterable[_Union[GapCause, _Mapping]]] = ..., drafts: _Optional[_Iterable[_Union[Drafts, _Mapping]]] = ..., attempt_ids: _Optional[_Iterable[int]] = ..., choices: _Optional[_Iterable[int]] = ..., offsets: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Drafts(_message.Message):
    __slots__ = ("output", "drafted_tokens", "accepted_tokens", "saved_ms")
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAVED_MS_FIELD_NUMBER: _ClassVar[int]
    output: int
    drafted_tokens: int
    accepted_tokens: int
    saved_ms: float
    def __init__(self, output: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., saved_ms: _Optional[float] = ...) -> None: ...

class Gap(_message.Message):
    __slots__ = ("output", "usual_ms", "causes")
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    USUAL_MS_FIELD_NUMBER: _ClassVar[int]
    CAUSES_FIELD_NUMBER: _ClassVar[int]
    output: int
    usual_ms: float
    causes: _containers.RepeatedCompositeFieldContainer[GapCause]
    def __init__(self, output: _Optional[int] = ..., usual_ms: _Optional[float] = ..., causes: _Optional[_Iterable[_Union[GapCause, _Mapping]]] = ...) -> None: ...

class GapCause(_message.Message):
    __slots__ = ("cause", "ms", "request_id", "detail")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    MS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    cause: StallCause
    ms: float
    request_id: str
    detail: str
    def __init__(self, cause: _Optional[_Union[StallCause, str]] = ..., ms: _Optional[float] = ..., request_id: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class SequenceOutput(_message.Message):
    __slots__ = ("attempt_id", "choice", "offset", "token_ids", "end", "logprobs", "top_token_ids", "top_logprobs")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: int
    choice: int
    offset: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    end: EndReason
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, attempt_id: _Optional[int] = ..., choice: _Optional[int] = ..., offset: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., end: _Optional[_Union[EndReason, str]] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Landed(_message.Message):
    __slots__ = ("attempt_id", "bytes", "copy_ms", "exposed_ms", "admission_ms", "first_step_ms", "transport", "cached_tokens")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    COPY_MS_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_MS_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: int
    bytes: int
    copy_ms: float
    exposed_ms: float
    admission_ms: float
    first_step_ms: float
    transport: str
    cached_tokens: int
    def __init__(self, attempt_id: _Optional[int] = ..., bytes: _Optional[int] = ..., copy_ms: _Optional[float] = ..., exposed_ms: _Optional[float] = ..., admission_ms: _Optional[float] = ..., first_step_ms: _Optional[float] = ..., transport: _Optional[str] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("attempt_id", "reason", "message")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    attempt_id: int
    reason: FailureReason
    message: str
    def __init__(self, attempt_id: _Optional[int] = ..., reason: _Optional[_Union[FailureReason, str]] = ..., message: _Optional[str] = ...) -> None: ...
