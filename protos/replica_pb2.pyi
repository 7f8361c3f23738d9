from baton.protos import versions_pb2 as _versions_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RouterShare(_message.Message):
    __slots__ = ("router_id", "number", "loads", "predictions", "takeovers", "keys", "address", "uptime_s", "versions")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    PREDICTIONS_FIELD_NUMBER: _ClassVar[int]
    TAKEOVERS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    router_id: bytes
    number: int
    loads: _containers.RepeatedCompositeFieldContainer[SharedLoad]
    predictions: _containers.RepeatedCompositeFieldContainer[SharedPrediction]
    takeovers: _containers.RepeatedCompositeFieldContainer[SharedTakeover]
    keys: _containers.RepeatedCompositeFieldContainer[SharedKey]
    address: str
    uptime_s: float
    versions: _versions_pb2.Versions
    def __init__(self, router_id: _Optional[bytes] = ..., number: _Optional[int] = ..., loads: _Optional[_Iterable[_Union[SharedLoad, _Mapping]]] = ..., predictions: _Optional[_Iterable[_Union[SharedPrediction, _Mapping]]] = ..., takeovers: _Optional[_Iterable[_Union[SharedTakeover, _Mapping]]] = ..., keys: _Optional[_Iterable[_Union[SharedKey, _Mapping]]] = ..., address: _Optional[str] = ..., uptime_s: _Optional[float] = ..., versions: _Optional[_Union[_versions_pb2.Versions, _Mapping]] = ...) -> None: ...

class SharedKey(_message.Message):
    __slots__ = ("name", "active", "requests", "tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    active: int
    requests: int
    tokens: int
    def __init__(self, name: _Optional[str] = ..., active: _Optional[int] = ..., requests: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class SharedTakeover(_message.Message):
    __slots__ = ("router_id", "stream")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    router_id: bytes
    stream: int
    def __init__(self, router_id: _Optional[bytes] = ..., stream: _Optional[int] = ...) -> None: ...

class SharedLoad(_message.Message):
    __slots__ = ("endpoint", "requests", "tokens", "blocks", "slots")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    requests: int
    tokens: int
    blocks: int
    slots: int
    def __init__(self, endpoint: _Optional[str] = ..., requests: _Optional[int] = ..., tokens: _Optional[int] = ..., blocks: _Optional[int] = ..., slots: _Optional[int] = ...) -> None: ...

class SharedPrediction(_message.Message):
    __slots__ = ("number", "endpoint", "block_hashes", "computed_tokens")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    number: int
    endpoint: str
    block_hashes: bytes
    computed_tokens: int
    def __init__(self, number: _Optional[int] = ..., endpoint: _Optional[str] = ..., block_hashes: _Optional[bytes] = ..., computed_tokens: _Optional[int] = ...) -> None: ...
