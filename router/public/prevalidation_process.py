"""The process that looks at large gRPC messages before the router does: see router/public/prevalidation.py."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from baton.protos import baton_pb2
from baton.router.model.validation import MAX_TEXT_BYTES
from baton.router.public.malformed import Malformed, parser
from baton.router.public.prevalidation import FAULT, SOUND
from baton.service.errors import InvalidArgument
from baton.service.helper import Buffer, answer_frames

MAX_PARTS = 1 << 14
"""Texts and messages, in all. A millisecond."""
MAX_NUMBERS = 1 << 18
"""A prompt of 128 Ki token ids, and answers to be continued. A millisecond or two."""


class _Count:
    """Of the contents of a message. Its methods raise InvalidArgument that names the field which has too much."""

    def __init__(self) -> None:
        self._parts = 0
        self._numbers = 0

    def message(self, message: Message, path: str) -> None:
        for field, value in message.ListFields():
            self._field(field, value, f"{path}{field.name}")

    def _field(self, field: FieldDescriptor, value: Any, path: str) -> None:
        if field.is_repeated:
            self._add(field, len(value), path)
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for each in value if field.is_repeated else (value,):
                self.message(each, f"{path}.")
        elif field.type == FieldDescriptor.TYPE_STRING:
            for text in value if field.is_repeated else (value,):
                if len(text) > MAX_TEXT_BYTES or len(text.encode()) > MAX_TEXT_BYTES:
                    raise InvalidArgument(path, f"at most {MAX_TEXT_BYTES} bytes of text")

    def _add(self, field: FieldDescriptor, length: int, path: str) -> None:
        if field.message_type is None and field.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            self._numbers += length
            if self._numbers > MAX_NUMBERS:
                raise InvalidArgument(path, f"at most {MAX_NUMBERS} numbers in all")
        else:
            self._parts += length
            if self._parts > MAX_PARTS:
                raise InvalidArgument(path, f"at most {MAX_PARTS} texts and messages in all")


def verdict(asked: memoryview) -> Sequence[Buffer]:
    """The full name of a type of messages, a line end, and the bytes of one."""
    name, _, data = bytes(asked).partition(b"\n")
    descriptor = baton_pb2.DESCRIPTOR.pool.FindMessageTypeByName(name.decode())
    message = parser(GetMessageClass(descriptor))(data)
    if isinstance(message, Malformed):
        return _fault(message.field, message.description)
    try:
        _Count().message(message, "")
    except InvalidArgument as error:
        return _fault(error.field, error.description)
    message.DiscardUnknownFields()
    return [SOUND, message.SerializeToString()]


def _fault(field: str, description: str) -> Sequence[Buffer]:
    return [FAULT, json.dumps([field, description]).encode()]


if __name__ == "__main__":
    sys.exit(answer_frames(verdict))
