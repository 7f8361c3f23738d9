from baton.protos import versions_pb2 as _versions_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PairRequest(_message.Message):
    __slots__ = ("reader",)
    READER_FIELD_NUMBER: _ClassVar[int]
    reader: PoolDescription
    def __init__(self, reader: _Optional[_Union[PoolDescription, _Mapping]] = ...) -> None: ...

class PairResponse(_message.Message):
    __slots__ = ("source",)
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    source: PoolDescription
    def __init__(self, source: _Optional[_Union[PoolDescription, _Mapping]] = ...) -> None: ...

class PoolDescription(_message.Message):
    __slots__ = ("fingerprint", "block_bytes", "num_blocks", "host_id", "shared_memory", "pool_id", "device_memory", "group_backend", "parts", "rows", "nixl", "versions", "kv", "tcp_port")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    GROUP_BACKEND_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    NIXL_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    TCP_PORT_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    block_bytes: int
    num_blocks: int
    host_id: str
    shared_memory: SharedMemoryHandle
    pool_id: bytes
    device_memory: _containers.RepeatedCompositeFieldContainer[DeviceMemoryHandle]
    group_backend: str
    parts: int
    rows: int
    nixl: NixlHandle
    versions: _versions_pb2.Versions
    kv: _versions_pb2.KvContent
    tcp_port: int
    def __init__(self, fingerprint: _Optional[bytes] = ..., block_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., host_id: _Optional[str] = ..., shared_memory: _Optional[_Union[SharedMemoryHandle, _Mapping]] = ..., pool_id: _Optional[bytes] = ..., device_memory: _Optional[_Iterable[_Union[DeviceMemoryHandle, _Mapping]]] = ..., group_backend: _Optional[str] = ..., parts: _Optional[int] = ..., rows: _Optional[int] = ..., nixl: _Optional[_Union[NixlHandle, _Mapping]] = ..., versions: _Optional[_Union[_versions_pb2.Versions, _Mapping]] = ..., kv: _Optional[_Union[_versions_pb2.KvContent, _Mapping]] = ..., tcp_port: _Optional[int] = ...) -> None: ...

class NixlHandle(_message.Message):
    __slots__ = ("metadata", "address", "device", "memory")
    METADATA_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    metadata: bytes
    address: int
    device: int
    memory: str
    def __init__(self, metadata: _Optional[bytes] = ..., address: _Optional[int] = ..., device: _Optional[int] = ..., memory: _Optional[str] = ...) -> None: ...

class SharedMemoryHandle(_message.Message):
    __slots__ = ("pid", "fd", "inode", "size_bytes")
    PID_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    pid: int
    fd: int
    inode: int
    size_bytes: int
    def __init__(self, pid: _Optional[int] = ..., fd: _Optional[int] = ..., inode: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class DeviceMemoryHandle(_message.Message):
    __slots__ = ("handle", "offset_bytes", "size_bytes")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    offset_bytes: int
    size_bytes: int
    def __init__(self, handle: _Optional[bytes] = ..., offset_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("transfer_id", "pool_id", "block_hashes", "restore")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    pool_id: bytes
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    restore: bool
    def __init__(self, transfer_id: _Optional[bytes] = ..., pool_id: _Optional[bytes] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., restore: bool = ...) -> None: ...

class OpenResponse(_message.Message):
    __slots__ = ("watermark_blocks", "blocks", "end", "checksums")
    WATERMARK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    watermark_blocks: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    end: TransferEnd
    checksums: _containers.RepeatedCompositeFieldContainer[BlockChecksum]
    def __init__(self, watermark_blocks: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., end: _Optional[_Union[TransferEnd, _Mapping]] = ..., checksums: _Optional[_Iterable[_Union[BlockChecksum, _Mapping]]] = ...) -> None: ...

class BlockChecksum(_message.Message):
    __slots__ = ("block", "value")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    block: int
    value: int
    def __init__(self, block: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...

class TransferEnd(_message.Message):
    __slots__ = ("first_tokens", "age_ms")
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    first_tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    age_ms: float
    def __init__(self, first_tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., age_ms: _Optional[float] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("choice", "token_id", "ended", "logprob", "top_token_ids", "top_logprobs")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    token_id: int
    ended: bool
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, choice: _Optional[int] = ..., token_id: _Optional[int] = ..., ended: bool = ..., logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("range", "probe_bytes")
    RANGE_FIELD_NUMBER: _ClassVar[int]
    PROBE_BYTES_FIELD_NUMBER: _ClassVar[int]
    range: TransferRange
    probe_bytes: int
    def __init__(self, range: _Optional[_Union[TransferRange, _Mapping]] = ..., probe_bytes: _Optional[int] = ...) -> None: ...

class TransferRange(_message.Message):
    __slots__ = ("transfer_id", "first_block", "num_blocks")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    first_block: int
    num_blocks: int
    def __init__(self, transfer_id: _Optional[bytes] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class ReadResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("transfer_id", "complete", "gpu", "slow_down", "corrupt")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    SLOW_DOWN_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    complete: bool
    gpu: str
    slow_down: float
    corrupt: bool
    def __init__(self, transfer_id: _Optional[bytes] = ..., complete: bool = ..., gpu: _Optional[str] = ..., slow_down: _Optional[float] = ..., corrupt: bool = ...) -> None: ...

class CloseResponse(_message.Message):
    __slots__ = ("valid",)
    VALID_FIELD_NUMBER: _ClassVar[int]
    valid: bool
    def __init__(self, valid: bool = ...) -> None: ...

class ConfirmRequest(_message.Message):
    __slots__ = ("transfer_id",)
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    def __init__(self, transfer_id: _Optional[bytes] = ...) -> None: ...

class ConfirmResponse(_message.Message):
    __slots__ = ("pinned",)
    PINNED_FIELD_NUMBER: _ClassVar[int]
    pinned: bool
    def __init__(self, pinned: bool = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("group_id", "pool_id", "reader", "backend", "blocks_per_message")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PER_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    group_id: bytes
    pool_id: bytes
    reader: PoolDescription
    backend: str
    blocks_per_message: int
    def __init__(self, group_id: _Optional[bytes] = ..., pool_id: _Optional[bytes] = ..., reader: _Optional[_Union[PoolDescription, _Mapping]] = ..., backend: _Optional[str] = ..., blocks_per_message: _Optional[int] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("met",)
    MET_FIELD_NUMBER: _ClassVar[int]
    met: bool
    def __init__(self, met: bool = ...) -> None: ...

class StoreRequest(_message.Message):
    __slots__ = ("group_id", "set", "get", "wait", "check", "add", "delete", "timeout_ms")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    GET_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    DELETE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    group_id: bytes
    set: StoreValue
    get: str
    wait: StoreKeys
    check: StoreKeys
    add: StoreAddition
    delete: str
    timeout_ms: int
    def __init__(self, group_id: _Optional[bytes] = ..., set: _Optional[_Union[StoreValue, _Mapping]] = ..., get: _Optional[str] = ..., wait: _Optional[_Union[StoreKeys, _Mapping]] = ..., check: _Optional[_Union[StoreKeys, _Mapping]] = ..., add: _Optional[_Union[StoreAddition, _Mapping]] = ..., delete: _Optional[str] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class StoreKeys(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, keys: _Optional[_Iterable[str]] = ...) -> None: ...

class StoreValue(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class StoreAddition(_message.Message):
    __slots__ = ("key", "amount")
    KEY_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    key: str
    amount: int
    def __init__(self, key: _Optional[str] = ..., amount: _Optional[int] = ...) -> None: ...

class StoreResponse(_message.Message):
    __slots__ = ("value", "sum", "found")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    value: bytes
    sum: int
    found: bool
    def __init__(self, value: _Optional[bytes] = ..., sum: _Optional[int] = ..., found: bool = ...) -> None: ...

class SendRequest(_message.Message):
    __slots__ = ("group_id", "first_sequence", "blocks", "probe_messages")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PROBE_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    group_id: bytes
    first_sequence: int
    blocks: TransferBlocks
    probe_messages: int
    def __init__(self, group_id: _Optional[bytes] = ..., first_sequence: _Optional[int] = ..., blocks: _Optional[_Union[TransferBlocks, _Mapping]] = ..., probe_messages: _Optional[int] = ...) -> None: ...

class TransferBlocks(_message.Message):
    __slots__ = ("transfer_id", "blocks")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, transfer_id: _Optional[bytes] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class SendResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
