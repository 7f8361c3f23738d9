"""Checks of large or malformed gRPC requests before they are parsed. Errors name the field.

gRPC parses a request before any handler is called, and a parser that raises ends the call with INTERNAL. So the parser
here never raises: it returns unparsed bytes, which the handler rejects with INVALID_ARGUMENT.

Parsing also blocks the event loop. So large messages are checked in a helper process, which runs this module: it
returns the error, or a message with so few parts that parsing it takes a millisecond or two.
"""

import json
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from baton.process.errors import InvalidArgument, ResourceExhausted, Unavailable
from baton.process.helper import Asks, Buffer, HelperBusy, HelperFailed, answer_frames
from baton.protos import baton_pb2
from baton.router.admission.queue import RETRY_AFTER_S
from baton.router.model.validation import MAX_TEXT_BYTES

SMALL_BYTES = 1 << 16  # maximum size parsed without a check; the worst case, only empty messages, takes 1 to 2 ms
MAX_PARTS = 1 << 14
"""Maximum number of texts and messages in a request. Parsing them takes 1 ms."""
MAX_NUMBERS = 1 << 18
"""Maximum number of numbers in a request, such as the token ids of a prompt. Parsing them takes 1 to 2 ms."""
_FAULT, _SOUND = b"\1", b"\0"
"""First byte of the helper's answer. An error as JSON follows _FAULT, the message without unknown fields _SOUND."""
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
_MAX_FIELDS = 1 << 14  # maximum number of fields that are searched for invalid UTF-8


@dataclass(frozen=True, slots=True)
class Unparsed:
    """Bytes of a request that has not been parsed yet. `message_class`: the request's type."""

    message_class: type[Message]
    data: bytes

    def parse(self) -> Message:
        """Parse the bytes. Raises: InvalidArgument naming the field that is invalid, if it is found."""
        try:
            return self.message_class.FromString(self.data)
        except DecodeError:
            descriptor = self.message_class.DESCRIPTOR
            path = invalid_text_field(self.data, descriptor)
        if path is None:
            raise InvalidArgument("request", f"is not a valid {descriptor.full_name}")
        raise InvalidArgument(path, "is not valid UTF-8")


Prevalidator = Callable[[Unparsed], Awaitable[Message]]
"""Function that checks and parses a request. Raises: InvalidArgument if it is invalid or has too many parts."""


class Prevalidation:
    """`Prevalidator` that uses a helper process. Call `close` at the end."""

    def __init__(self, helper: Asks) -> None:
        """Create a prevalidator. `helper`: process that runs this module."""
        self._helper = helper
        self.prevalidated = 0

    async def __call__(self, message: Unparsed) -> Message:
        """Check a request in the helper, then parse it. Raises: InvalidArgument, ResourceExhausted, Unavailable."""
        self.prevalidated += 1
        message_class = message.message_class
        try:
            answer = await self._helper.ask([f"{message_class.DESCRIPTOR.full_name}\n".encode(), message.data])
        except HelperBusy:
            busy = "too many large messages are being checked; retry"
            raise ResourceExhausted(busy, RETRY_AFTER_S, "too_many_large_messages") from None
        except HelperFailed as error:
            raise Unavailable("the check of a large message failed; retry", "NOT_LOOKED_AT", RETRY_AFTER_S) from error
        rest = bytes(memoryview(answer)[1:])
        if answer[:1] == _FAULT:
            field, description = json.loads(rest)
            raise InvalidArgument(field, description)
        return message_class.FromString(rest)

    def close(self) -> None:
        self._helper.close()


def verdict(asked: memoryview) -> Sequence[Buffer]:
    """Check a request. Return a status byte, followed by the error as JSON or by the serialised request.

    `asked`: full name of the request's message type, a newline, and the request's bytes.
    """
    name, _, data = bytes(asked).partition(b"\n")
    descriptor = baton_pb2.DESCRIPTOR.pool.FindMessageTypeByName(name.decode())
    try:
        message = Unparsed(GetMessageClass(descriptor), data).parse()
        _Count().message(message, "")
    except InvalidArgument as error:
        return [_FAULT, json.dumps([error.field, error.description]).encode()]
    message.DiscardUnknownFields()
    return [_SOUND, message.SerializeToString()]


class _Count:
    """Counter of a request's parts and numbers. Its methods raise InvalidArgument naming a field over a limit."""

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
                    raise InvalidArgument(path, f"exceeds {MAX_TEXT_BYTES} bytes of text")

    def _add(self, field: FieldDescriptor, length: int, path: str) -> None:
        if field.message_type is None and field.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            self._numbers += length
            if self._numbers > MAX_NUMBERS:
                raise InvalidArgument(path, f"at most {MAX_NUMBERS} numbers in all")
        else:
            self._parts += length
            if self._parts > MAX_PARTS:
                raise InvalidArgument(path, f"at most {MAX_PARTS} texts and messages in all")


def invalid_text_field(data: bytes, descriptor: Any) -> str | None:
    """Return the path of the first string field that is not UTF-8; None without such a field, for too many fields, or
    for a broken wire format.
    """
    try:
        return _search(memoryview(data), descriptor, iter(range(_MAX_FIELDS)))
    except (IndexError, ValueError, StopIteration):
        return None


def _search(data: memoryview, descriptor: Any, left: Iterator[int]) -> str | None:
    position = 0
    seen: dict[int, int] = {}
    while position < len(data):
        next(left)
        tag, position = _varint(data, position)
        number, wire_type = tag >> 3, tag & 7
        begin, position = _extent(data, position, wire_type)
        field = descriptor.fields_by_number.get(number)
        if field is None or wire_type != _LENGTH:
            continue
        index = seen[number] = seen.get(number, -1) + 1
        found = _search_field(data[begin:position], field, left)
        if found is not None:
            return f"{field.name}[{index}]{found}" if field.is_repeated else f"{field.name}{found}"
    return None


def _search_field(value: memoryview, field: FieldDescriptor, left: Iterator[int]) -> str | None:
    """Return the path of invalid text within a value: empty for the value itself; None if all its text is valid."""
    if field.message_type is not None:
        inner = _search(value, field.message_type, left)
        return None if inner is None else f".{inner}"
    if field.type != FieldDescriptor.TYPE_STRING:
        return None
    try:
        str(value, "utf-8")
    except UnicodeDecodeError:
        return ""
    return None


def _extent(data: memoryview, position: int, wire_type: int) -> tuple[int, int]:
    """Return begin and end of a field's value at `position`. Raises: ValueError, IndexError for a broken format."""
    if wire_type == _VARINT:
        return position, _varint(data, position)[1]
    if wire_type == _LENGTH:
        length, position = _varint(data, position)
    elif wire_type in (_FIXED32, _FIXED64):
        length = 4 if wire_type == _FIXED32 else 8
    else:
        raise ValueError(f"wire type {wire_type}")
    if position + length > len(data):
        raise ValueError("the message is truncated")
    return position, position + length


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """Return the varint at `position` and the position after it. Raises: ValueError, IndexError if it is invalid."""
    value = 0
    for shift in range(_MAX_VARINT_BYTES):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, position
    raise ValueError("a varint is too long")


if __name__ == "__main__":
    sys.exit(answer_frames(verdict))
