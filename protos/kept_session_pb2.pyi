from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class KeptSession(_message.Message):
    __slots__ = ("id", "owner", "keep_for_s", "done", "name")
    ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    KEEP_FOR_S_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    owner: bytes
    keep_for_s: float
    done: bool
    name: str
    def __init__(self, id: _Optional[bytes] = ..., owner: _Optional[bytes] = ..., keep_for_s: _Optional[float] = ..., done: bool = ..., name: _Optional[str] = ...) -> None: ...
