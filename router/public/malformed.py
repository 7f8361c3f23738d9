"""Bytes that are no message become INVALID_ARGUMENT naming the field, instead of gRPC's own INTERNAL.

gRPC parses a request before any handler or interceptor of ours is called, and a parser that raises ends the call as a
server error. So the parser here never raises: it hands on bytes that it cannot parse, and the handler refuses them. And
parsing holds the event loop: a `Prevalidator` first examines messages that are large or broken, in another process.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Never

import grpc
from google.protobuf.descriptor import FieldDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from baton.service.errors import BatonError, InvalidArgument

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
_MAX_FIELDS = 1 << 14  # that are looked through


@dataclass(frozen=True, slots=True)
class Malformed:
    """Stands in for a request that could not be parsed."""

    field: str
    description: str

    def refuse(self) -> Never:
        raise InvalidArgument(self.field, self.description)


@dataclass(frozen=True, slots=True)
class NotPrevalidated:
    """Stands in for a request that has not been parsed yet."""

    message_class: type[Message]
    data: bytes


SMALL_BYTES = 1 << 16  # a millisecond or two, of empty messages
Prevalidator = Callable[[NotPrevalidated], Awaitable[Message]]
"""Raises InvalidArgument for bytes that are no message, or one of too many parts."""


Refused = Callable[[str, BatonError], None]
"""Called with the name of a method, and why a request to it was not parsed."""


def service_handler(
    service: ServiceDescriptor,
    servicer: object,
    prevalidator: Prevalidator | None = None,
    refused: Refused = lambda method, error: None,
) -> grpc.GenericRpcHandler:
    """Handlers of all methods of a service, as the generated `add_..._to_server` makes them, with parsers that never
    raise."""
    return grpc.method_handlers_generic_handler(
        service.full_name,
        {
            method.name: _method_handler(
                method, getattr(servicer, method.name), prevalidator, partial(refused, method.name)
            )
            for method in service.methods
        },
    )


def small_parser(message_class: type[Message]) -> Callable[[bytes], Message | NotPrevalidated]:
    """A parser for messages that are small and whole."""

    def parse(data: bytes) -> Message | NotPrevalidated:
        if len(data) > SMALL_BYTES:
            return NotPrevalidated(message_class, data)
        try:
            return message_class.FromString(data)
        except DecodeError:  # finding the place takes a while
            return NotPrevalidated(message_class, data)

    return parse


def parser(message_class: type[Message]) -> Callable[[bytes], Message | Malformed]:
    def parse(data: bytes) -> Message | Malformed:
        try:
            return message_class.FromString(data)
        except DecodeError:
            path = invalid_text_field(data, message_class.DESCRIPTOR)
            if path is None:
                return Malformed("request", f"not a {message_class.DESCRIPTOR.full_name}")
            return Malformed(path, "not valid UTF-8")

    return parse


def invalid_text_field(data: bytes, descriptor: Any) -> str | None:
    """Path of the first string field that is not UTF-8; None if there is none among the first ones, or the wire format
    itself is broken.
    """
    try:
        return _search(memoryview(data), descriptor, iter(range(_MAX_FIELDS)))
    except (IndexError, ValueError, StopIteration):
        return None


def _method_handler(
    method: Any,
    behaviour: Callable[[Any, Any], Any],
    prevalidator: Prevalidator | None,
    refused: Callable[[BatonError], None],
) -> Any:
    make_handler = (
        grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
    )
    request_class = GetMessageClass(method.input_type)
    return make_handler(
        _refusing(behaviour, prevalidator, refused),
        request_deserializer=parser(request_class) if prevalidator is None else small_parser(request_class),
        response_serializer=GetMessageClass(method.output_type).SerializeToString,
    )


def _refusing(
    behaviour: Callable[[Any, Any], Any], prevalidator: Prevalidator | None, refused: Callable[[BatonError], None]
) -> Callable[[Any, Any], Any]:
    if not inspect.iscoroutinefunction(behaviour):
        raise TypeError(f"{behaviour} must be a coroutine function; a stream is written with context.write()")

    async def handle(request: Message | Malformed | NotPrevalidated, context: Any) -> Any:
        try:
            if isinstance(request, Malformed):
                request.refuse()
            if isinstance(request, NotPrevalidated) and prevalidator is not None:
                request = await prevalidator(request)
        except BatonError as error:
            refused(error)
            raise
        return await behaviour(request, context)

    return handle


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
    """The rest of the path, "" for this field itself."""
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
    """Where the value at `position` begins and ends. Raises ValueError, IndexError for a broken wire format."""
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
    """Value and the position behind it."""
    value = 0
    for shift in range(_MAX_VARINT_BYTES):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, position
    raise ValueError("a varint is too long")
