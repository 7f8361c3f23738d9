"""Conversion of protobuf messages to the client's dataclasses, driven by the dataclass's fields."""

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache
from operator import attrgetter
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from baton.client.cluster import AdapterStatus, ClusterStatus, Role, RouterStatus, WorkerStatus
from baton.client.timelines import RoutedStall, TimelineStep
from baton.protos import session_pb2

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ROLES: Mapping[int, Role] = {session_pb2.ROLE_PREFILL: "prefill", session_pb2.ROLE_DECODE: "decode"}
Value = TypeVar("Value", bound="DataclassInstance")

_PATHS: Mapping[type, Mapping[str, str]] = {
    ClusterStatus: {"release": "versions.release", "protocol": "versions.protocol"},
    RouterStatus: {"release": "versions.release"},
    TimelineStep: {"answer_requests": "request_numbers"},
    WorkerStatus: {
        **{name: f"worker.{name}" for name in ("worker_id", "role", "roles", "pid", "fingerprint", "arithmetic")},
        **{name: f"worker.{name}" for name in ("model", "total_blocks", "total_slots")},
        "model_path": "worker.model.path",
        "load": "report",
        "release": "worker.versions.release",
        "protocol": "worker.versions.protocol",
        "kv_layout": "worker.kv.layout",
    },
}
"""Path of a value in the message, by dataclass and field, if it differs from the field's name."""


def _cause(cause: session_pb2.GapCause) -> str:
    """Return the cause of a stall in words, such as `prompt tokens by chat-7`."""
    name = session_pb2.StallCause.Name(cause.cause).removeprefix("STALL_CAUSE_").lower().replace("_", " ")
    return f"{name} by {cause.request_id}" if cause.request_id else name


_MAPPINGS: Mapping[tuple[type, str], Callable[[Any], Mapping[Any, Any]]] = {
    (AdapterStatus, "missing"): lambda status: {each.worker_id: each.why for each in status.missing},
    (RoutedStall, "causes_ms"): lambda stall: {_cause(cause): cause.ms for cause in stall.causes},
    (TimelineStep, "prompts"): lambda step: {each.request_number: each.tokens for each in step.prompts},
}
"""Conversion of a message's list of pairs to a mapping, by dataclass and field."""


def value_from(kind: type[Value], message: Message, **given: Any) -> Value:
    """Return a message as a dataclass. `given`: values of fields that are not read from the message."""
    readers = _readers(kind, message.DESCRIPTOR)
    return kind(**{name: read(message) for name, read in readers.items() if name not in given}, **given)


@cache
def _readers(kind: type["DataclassInstance"], descriptor: Descriptor) -> Mapping[str, Callable[[Any], Any]]:
    """Return a reader for each field of a dataclass, by name. Fields that the message lacks get no reader."""
    hints, paths, known = get_type_hints(kind), _PATHS.get(kind, {}), descriptor.fields_by_name
    readers = dict[str, Callable[[Any], Any]]()
    for name, hint in hints.items():
        path = paths.get(name, name)
        if (kind, name) in _MAPPINGS:
            readers[name] = _MAPPINGS[kind, name]
        elif path in known or "." in path:
            is_optional = NoneType in get_args(hint)
            has_presence = is_optional and known[path].has_presence
            readers[name] = _reader(path, _converter(hint), is_optional, has_presence)
    return readers


def _reader(path: str, convert: Callable[[Any], Any], is_optional: bool, has_presence: bool) -> Callable[[Any], Any]:
    """Return the function that reads one field. 0 is read as None if the field is optional here but not in protobuf."""
    get = attrgetter(path)
    if has_presence:
        return lambda message: convert(get(message)) if message.HasField(path) else None
    return lambda message: (convert(get(message)) or None) if is_optional else convert(get(message))


def _converter(hint: Any) -> Callable[[Any], Any]:
    """Return the function that converts a value to a field's type; for a union, to its first member."""
    arguments = get_args(hint)
    if NoneType in arguments:
        return _converter(arguments[0])
    if is_dataclass(hint):
        return lambda message: value_from(cast("type[DataclassInstance]", hint), message)
    if get_origin(hint) is tuple:
        each = _converter(arguments[0])
        return lambda values: tuple(map(each, values))
    if get_origin(hint) is Mapping:
        return lambda values: dict(sorted(values.items()))  # sorted by key, since protobuf maps have no order
    if get_origin(hint) is Literal:
        return lambda number: ROLES.get(number, "unknown")
    if hint is str:
        return lambda value: value.hex() if isinstance(value, bytes) else value
    return lambda value: value
