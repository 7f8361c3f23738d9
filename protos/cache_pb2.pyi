from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class SnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CacheEvents(_message.Message):
    __slots__ = ("sequence", "stored", "evicted")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    stored: bytes
    evicted: bytes
    def __init__(self, sequence: _Optional[int] = ..., stored: _Optional[bytes] = ..., evicted: _Optional[bytes] = ...) -> None: ...

class CacheSnapshot(_message.Message):
    __slots__ = ("sequence", "part", "parts", "hashes")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    part: int
    parts: int
    hashes: bytes
    def __init__(self, sequence: _Optional[int] = ..., part: _Optional[int] = ..., parts: _Optional[int] = ..., hashes: _Optional[bytes] = ...) -> None: ...
