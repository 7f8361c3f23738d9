from baton.protos import kept_session_pb2 as _kept_session_pb2
from baton.protos import sampling_pb2 as _sampling_pb2
from baton.protos import versions_pb2 as _versions_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JournalRecord(_message.Message):
    __slots__ = ("version", "router_id", "places", "request_id", "operation", "model", "fingerprint", "adapter_digest", "token_ids", "sampling", "cache_root", "stop", "n", "tells_logprobs", "echo", "echo_text", "priority", "session", "stream", "kept_session", "versions", "ttft_slo_ms", "tbt_slo_ms")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_ROOT_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    TELLS_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    ECHO_TEXT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    KEPT_SESSION_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_MS_FIELD_NUMBER: _ClassVar[int]
    TBT_SLO_MS_FIELD_NUMBER: _ClassVar[int]
    version: int
    router_id: bytes
    places: _containers.RepeatedCompositeFieldContainer[JournalPlace]
    request_id: str
    operation: str
    model: str
    fingerprint: bytes
    adapter_digest: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _sampling_pb2.Sampling
    cache_root: bytes
    stop: _containers.RepeatedScalarFieldContainer[str]
    n: int
    tells_logprobs: bool
    echo: bool
    echo_text: str
    priority: int
    session: str
    stream: int
    kept_session: _kept_session_pb2.KeptSession
    versions: _versions_pb2.Versions
    ttft_slo_ms: float
    tbt_slo_ms: float
    def __init__(self, version: _Optional[int] = ..., router_id: _Optional[bytes] = ..., places: _Optional[_Iterable[_Union[JournalPlace, _Mapping]]] = ..., request_id: _Optional[str] = ..., operation: _Optional[str] = ..., model: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., adapter_digest: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_sampling_pb2.Sampling, _Mapping]] = ..., cache_root: _Optional[bytes] = ..., stop: _Optional[_Iterable[str]] = ..., n: _Optional[int] = ..., tells_logprobs: bool = ..., echo: bool = ..., echo_text: _Optional[str] = ..., priority: _Optional[int] = ..., session: _Optional[str] = ..., stream: _Optional[int] = ..., kept_session: _Optional[_Union[_kept_session_pb2.KeptSession, _Mapping]] = ..., versions: _Optional[_Union[_versions_pb2.Versions, _Mapping]] = ..., ttft_slo_ms: _Optional[float] = ..., tbt_slo_ms: _Optional[float] = ...) -> None: ...

class JournalPlace(_message.Message):
    __slots__ = ("endpoint", "attempt_id", "first_choice", "choices", "answered_tokens")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHOICE_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    attempt_id: int
    first_choice: int
    choices: int
    answered_tokens: int
    def __init__(self, endpoint: _Optional[str] = ..., attempt_id: _Optional[int] = ..., first_choice: _Optional[int] = ..., choices: _Optional[int] = ..., answered_tokens: _Optional[int] = ...) -> None: ...
