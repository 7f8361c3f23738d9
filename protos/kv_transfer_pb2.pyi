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
    __slots__ = ("fingerprint", "block_bytes", "num_blocks", "host_id", "shared_memory", "pool_id")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    block_bytes: int
    num_blocks: int
    host_id: str
    shared_memory: SharedMemoryHandle
    pool_id: bytes
    def __init__(self, fingerprint: _Optional[bytes] = ..., block_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., host_id: _Optional[str] = ..., shared_memory: _Optional[_Union[SharedMemoryHandle, _Mapping]] = ..., pool_id: _Optional[bytes] = ...) -> None: ...

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

class OpenRequest(_message.Message):
    __slots__ = ("transfer_id", "pool_id", "block_hashes")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    pool_id: bytes
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, transfer_id: _Optional[bytes] = ..., pool_id: _Optional[bytes] = ..., block_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class OpenResponse(_message.Message):
    __slots__ = ("watermark_blocks", "blocks", "end")
    WATERMARK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    watermark_blocks: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    end: TransferEnd
    def __init__(self, watermark_blocks: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., end: _Optional[_Union[TransferEnd, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("transfer_id", "complete")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    complete: bool
    def __init__(self, transfer_id: _Optional[bytes] = ..., complete: bool = ...) -> None: ...

class CloseResponse(_message.Message):
    __slots__ = ("valid",)
    VALID_FIELD_NUMBER: _ClassVar[int]
    valid: bool
    def __init__(self, valid: bool = ...) -> None: ...
