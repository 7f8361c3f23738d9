"""Conversion of dataclasses, named tuples and enums to plain JSON values and back, driven by their type hints.

Fields with their default value are omitted, and unknown fields are ignored, so that records of neighbouring releases
can be read.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

Value = TypeVar("Value")


def to_plain(value: Any) -> Any:
    """Return a value as JSON values: bytes as hexadecimal digits, enums by name, sets as sorted lists."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, bytes):
        return value.hex()
    if hasattr(value, "_field_defaults"):
        return _without_defaults(value._asdict(), value._field_defaults)
    if is_dataclass(value) and not isinstance(value, type):
        known = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
        return _without_defaults(known, _defaults(type(value)))
    if isinstance(value, Mapping):
        return {key: to_plain(each) for key, each in value.items()}
    if isinstance(value, frozenset):
        return sorted(map(to_plain, value))
    if isinstance(value, tuple | list):
        return [to_plain(each) for each in value]
    return value


def from_plain(kind: type[Value], plain: Any) -> Value:
    """Return the value of type `kind` from which `to_plain` made `plain`. Raises: KeyError, TypeError, ValueError."""
    return cast(Value, _from_plain(kind, plain))


def _from_plain(kind: Any, plain: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):  # of a type and None
        return None if plain is None else _from_plain(arguments[0], plain)
    if origin in (tuple, frozenset):
        kinds = arguments if origin is tuple and arguments[-1] is not ... else arguments[:1] * len(plain)
        return origin(_from_plain(each, value) for each, value in zip(kinds, plain, strict=True))
    if origin is not None:
        return {arguments[0](key): _from_plain(arguments[1], value) for key, value in plain.items()}
    if issubclass(kind, Enum):
        return kind[plain]
    if kind is bytes:
        return bytes.fromhex(plain)
    if is_dataclass(kind) or hasattr(kind, "_field_defaults"):
        hints = get_type_hints(kind)
        return kind(**{name: _from_plain(hints[name], value) for name, value in plain.items() if name in hints})
    return plain


def _without_defaults(known: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: to_plain(value) for name, value in known.items() if name not in defaults or value != defaults[name]}


def _defaults(kind: type[Any]) -> Mapping[str, Any]:
    found = {each.name: each.default for each in fields(kind) if each.default is not MISSING}
    return found | {each.name: each.default_factory() for each in fields(kind) if each.default_factory is not MISSING}
