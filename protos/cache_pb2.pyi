from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SnapshotRequest(_message.Message):
    __slots__ = ("tier",)
    TIER_FIELD_NUMBER: _ClassVar[int]
    tier: bool
    def __init__(self, tier: bool = ...) -> None: ...

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

class TierEvents(_message.Message):
    __slots__ = ("sequence", "stored", "removed_segments")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    stored: _containers.RepeatedCompositeFieldContainer[TierPiece]
    removed_segments: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence: _Optional[int] = ..., stored: _Optional[_Iterable[_Union[TierPiece, _Mapping]]] = ..., removed_segments: _Optional[_Iterable[int]] = ...) -> None: ...

class TierPiece(_message.Message):
    __slots__ = ("segment", "first_slot", "names")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    FIRST_SLOT_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    segment: int
    first_slot: int
    names: bytes
    def __init__(self, segment: _Optional[int] = ..., first_slot: _Optional[int] = ..., names: _Optional[bytes] = ...) -> None: ...

class TierSnapshot(_message.Message):
    __slots__ = ("sequence", "part", "parts", "stored")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    part: int
    parts: int
    stored: _containers.RepeatedCompositeFieldContainer[TierPiece]
    def __init__(self, sequence: _Optional[int] = ..., part: _Optional[int] = ..., parts: _Optional[int] = ..., stored: _Optional[_Iterable[_Union[TierPiece, _Mapping]]] = ...) -> None: ...
