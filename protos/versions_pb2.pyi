from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Versions(_message.Message):
    __slots__ = ("release", "protocol", "oldest_protocol")
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    release: str
    protocol: int
    oldest_protocol: int
    def __init__(self, release: _Optional[str] = ..., protocol: _Optional[int] = ..., oldest_protocol: _Optional[int] = ...) -> None: ...

class KvContent(_message.Message):
    __slots__ = ("checkpoint", "layout")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    checkpoint: bytes
    layout: str
    def __init__(self, checkpoint: _Optional[bytes] = ..., layout: _Optional[str] = ...) -> None: ...
