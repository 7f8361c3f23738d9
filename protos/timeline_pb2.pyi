from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetTimelineRequest(_message.Message):
    __slots__ = ("last_ms",)
    LAST_MS_FIELD_NUMBER: _ClassVar[int]
    last_ms: int
    def __init__(self, last_ms: _Optional[int] = ...) -> None: ...

class GetTimelineResponse(_message.Message):
    __slots__ = ("now_us", "steps", "requests", "total_blocks", "scheduler")
    class SchedulerEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NOW_US_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    now_us: int
    steps: _containers.RepeatedCompositeFieldContainer[TimelineStep]
    requests: _containers.RepeatedCompositeFieldContainer[TimelineRequest]
    total_blocks: int
    scheduler: _containers.ScalarMap[str, float]
    def __init__(self, now_us: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[TimelineStep, _Mapping]]] = ..., requests: _Optional[_Iterable[_Union[TimelineRequest, _Mapping]]] = ..., total_blocks: _Optional[int] = ..., scheduler: _Optional[_Mapping[str, float]] = ...) -> None: ...

class TimelineStep(_message.Message):
    __slots__ = ("number", "began_us", "ended_us", "answers", "context_tokens", "prompts", "moved_blocks", "held_blocks", "waiting", "late", "preempted", "request_numbers", "spent_ms", "drafted_tokens", "calls", "observed_s", "period_s", "digest")
    class SpentMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BEGAN_US_FIELD_NUMBER: _ClassVar[int]
    ENDED_US_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    MOVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_NUMBERS_FIELD_NUMBER: _ClassVar[int]
    SPENT_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_S_FIELD_NUMBER: _ClassVar[int]
    PERIOD_S_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    number: int
    began_us: int
    ended_us: int
    answers: int
    context_tokens: int
    prompts: _containers.RepeatedCompositeFieldContainer[TimelinePrompt]
    moved_blocks: int
    held_blocks: int
    waiting: int
    late: int
    preempted: int
    request_numbers: _containers.RepeatedScalarFieldContainer[int]
    spent_ms: _containers.ScalarMap[str, float]
    drafted_tokens: int
    calls: _containers.RepeatedCompositeFieldContainer[SchedulerCall]
    observed_s: float
    period_s: float
    digest: int
    def __init__(self, number: _Optional[int] = ..., began_us: _Optional[int] = ..., ended_us: _Optional[int] = ..., answers: _Optional[int] = ..., context_tokens: _Optional[int] = ..., prompts: _Optional[_Iterable[_Union[TimelinePrompt, _Mapping]]] = ..., moved_blocks: _Optional[int] = ..., held_blocks: _Optional[int] = ..., waiting: _Optional[int] = ..., late: _Optional[int] = ..., preempted: _Optional[int] = ..., request_numbers: _Optional[_Iterable[int]] = ..., spent_ms: _Optional[_Mapping[str, float]] = ..., drafted_tokens: _Optional[int] = ..., calls: _Optional[_Iterable[_Union[SchedulerCall, _Mapping]]] = ..., observed_s: _Optional[float] = ..., period_s: _Optional[float] = ..., digest: _Optional[int] = ...) -> None: ...

class SchedulerCall(_message.Message):
    __slots__ = ("kind", "request_number")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REQUEST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    kind: str
    request_number: int
    def __init__(self, kind: _Optional[str] = ..., request_number: _Optional[int] = ...) -> None: ...

class TimelinePrompt(_message.Message):
    __slots__ = ("request_number", "tokens")
    REQUEST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_number: int
    tokens: int
    def __init__(self, request_number: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class TimelineRequest(_message.Message):
    __slots__ = ("number", "request_id", "arrived_us", "prompt_tokens", "cached_tokens", "chunks", "transfer", "first_token_us", "last_token_us", "tokens", "ended_us", "failure", "drafted_tokens", "accepted_tokens", "wanted_us", "ttft_slo_ms", "tbt_slo_ms", "deadline_us")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_US_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_US_FIELD_NUMBER: _ClassVar[int]
    LAST_TOKEN_US_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_US_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WANTED_US_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_MS_FIELD_NUMBER: _ClassVar[int]
    TBT_SLO_MS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_US_FIELD_NUMBER: _ClassVar[int]
    number: int
    request_id: str
    arrived_us: int
    prompt_tokens: int
    cached_tokens: int
    chunks: _containers.RepeatedCompositeFieldContainer[TimelineChunk]
    transfer: TimelineTransfer
    first_token_us: int
    last_token_us: int
    tokens: int
    ended_us: int
    failure: str
    drafted_tokens: int
    accepted_tokens: int
    wanted_us: int
    ttft_slo_ms: float
    tbt_slo_ms: float
    deadline_us: int
    def __init__(self, number: _Optional[int] = ..., request_id: _Optional[str] = ..., arrived_us: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[TimelineChunk, _Mapping]]] = ..., transfer: _Optional[_Union[TimelineTransfer, _Mapping]] = ..., first_token_us: _Optional[int] = ..., last_token_us: _Optional[int] = ..., tokens: _Optional[int] = ..., ended_us: _Optional[int] = ..., failure: _Optional[str] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., wanted_us: _Optional[int] = ..., ttft_slo_ms: _Optional[float] = ..., tbt_slo_ms: _Optional[float] = ..., deadline_us: _Optional[int] = ...) -> None: ...

class TimelineChunk(_message.Message):
    __slots__ = ("began_us", "ended_us", "tokens")
    BEGAN_US_FIELD_NUMBER: _ClassVar[int]
    ENDED_US_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    began_us: int
    ended_us: int
    tokens: int
    def __init__(self, began_us: _Optional[int] = ..., ended_us: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class TimelineTransfer(_message.Message):
    __slots__ = ("began_us", "ended_us", "source", "bytes", "transport")
    BEGAN_US_FIELD_NUMBER: _ClassVar[int]
    ENDED_US_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    began_us: int
    ended_us: int
    source: str
    bytes: int
    transport: str
    def __init__(self, began_us: _Optional[int] = ..., ended_us: _Optional[int] = ..., source: _Optional[str] = ..., bytes: _Optional[int] = ..., transport: _Optional[str] = ...) -> None: ...
