"""Bounds of messages from other processes, checked in one pass before the message is used.

A field without a rule gets the default rule of its type: finite numbers up to MAX_EXACT, known enum values, short texts
and bytes, lists of at most LIST_ENTRIES. So new fields always have bounds. A check takes time proportional to the
size of the message.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MAX_EXACT = (1 << 53) - 1
"""Largest integer that doubles represent exactly: bound of versions, epochs and counters, which Lua and JavaScript
read.
"""
TEXT_CHARACTERS = 256
BYTES = 64
LIST_ENTRIES = 4096
_IPV6 = r"\[[0-9A-Fa-f:.]{2,45}(?:%[\w.-]{1,16})?\]"
_NAME_OR_IPV4 = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252}[A-Za-z0-9_])?"
ENDPOINT = re.compile(rf"(?:{_IPV6}|{_NAME_OR_IPV4}):([0-9]{{1,5}})")
MAX_PORT = 65_535

Rule = Callable[[Any], str | None]
"""Function that returns why a value is out of bounds, as the end of an error message; None if it is within."""


class OutOfBounds(ValueError):
    """Error: a field is out of bounds. The message names field, bound and, for a number, the value."""


def anything(value: object) -> None:
    """Accept any value of the field's type."""


def number(least: float = 0, most: float = MAX_EXACT) -> Rule:
    """Accept numbers in [least, most], which excludes NaN."""

    def fault(value: float) -> str | None:
        return None if least <= value <= most else f"must be from {least} to {most}, not {value}"

    return fault


def finite(value: float) -> str | None:
    return None if math.isfinite(value) else f"must be a finite number, not {value}"


def numbers(entries: int, least: float = 0, most: float = MAX_EXACT) -> Rule:
    """Accept lists of at most `entries` numbers in [least, most]."""

    def fault(values: Sequence[float]) -> str | None:
        if len(values) > entries:
            return f"at most {entries} entries, not {len(values)}"
        if len(values) and not least <= min(values) <= max(values) <= most:
            return f"each must be from {least} to {most}"
        return None

    return fault


def finites(entries: int) -> Rule:
    """Accept lists of at most `entries` finite numbers. Minimum and maximum do not suffice: in a list with NaN they may
    be finite.
    """

    def fault(values: Sequence[float]) -> str | None:
        if len(values) > entries:
            return f"at most {entries} entries, not {len(values)}"
        return None if all(map(math.isfinite, values)) else "each must be a finite number"

    return fault


def text(characters: int, pattern: "re.Pattern[str] | None" = None) -> Rule:
    def fault(value: str) -> str | None:
        if len(value) > characters:
            return f"at most {characters} characters, not {len(value)}"
        if pattern is not None and value and not pattern.fullmatch(value):
            return f"{value!r} contains a forbidden character"
        return None

    return fault


def size(*allowed: int) -> Rule:
    """Accept bytes of one of these lengths."""

    def fault(value: bytes) -> str | None:
        return None if len(value) in allowed else f"must be {' or '.join(map(str, allowed))} bytes, not {len(value)}"

    return fault


def blob(most: int) -> Rule:
    """Accept at most `most` bytes."""
    return lambda value: None if len(value) <= most else f"at most {most} bytes, not {len(value)}"


def entries(most: int, each: Rule = anything) -> Rule:
    """Accept lists, or keys of a map, of at most `most` entries that `each` accepts."""

    def fault(values: Sequence[Any]) -> str | None:
        if len(values) > most:
            return f"at most {most} entries, not {len(values)}"
        return next((f"[{place}] {why}" for place, value in enumerate(values) if (why := each(value))), None)

    return fault


def mapping(most: int, key: Rule, value: Rule) -> Rule:
    def fault(values: Mapping[Any, Any]) -> str | None:
        if len(values) > most:
            return f"at most {most} entries, not {len(values)}"
        return next((f"[{name}] {why}" for name in values if (why := key(name) or value(values[name]))), None)

    return fault


def endpoint(value: str) -> str | None:
    """Accept host:port, with an IPv6 host in brackets, but no other address that gRPC knows, such as unix:path."""
    match = ENDPOINT.fullmatch(value)
    if match is None or not 0 < int(match[1]) <= MAX_PORT:
        return f"must be host:port, not {value[:TEXT_CHARACTERS]!r}"
    return None


class Bounds:
    """Bounds of messages' fields. `rules`: rule of each field, by `Message.field`. The rule of a list of messages
    checks the list's length; each message is checked by its own fields' rules.
    """

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self._rules = rules
        self._plans: dict[str, dict[int, Rule]] = {}  # rules by message name and field number

    def check(self, message: Message | None) -> None:
        """Check a message; None: gRPC could not parse the message. Raises: OutOfBounds."""
        if message is None:
            raise OutOfBounds("message: cannot be parsed")
        plan = self._plans.get(message.DESCRIPTOR.full_name)
        if plan is None:
            plan = self._plans[message.DESCRIPTOR.full_name] = self._plan(message.DESCRIPTOR)
        for field, value in message.ListFields():
            try:
                why = plan[field.number](value)
            except OutOfBounds as inner:
                raise OutOfBounds(f"{field.name}.{inner}") from None
            if why is not None:
                raise OutOfBounds(f"{field.name}: {why}")

    def _plan(self, descriptor: Any) -> dict[int, Rule]:
        return {field.number: self._rule(descriptor, field) for field in descriptor.fields}

    def _rule(self, descriptor: Any, field: FieldDescriptor) -> Rule:
        own = self._rules.get(f"{descriptor.name}.{field.name}")
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            return own or _rule_of_type(field)
        if not _is_list(field):
            return own or self._check_one
        counted = own or entries(LIST_ENTRIES)
        return lambda messages: counted(messages) or self._check_each(messages)

    def _check_one(self, message: Message) -> None:
        self.check(message)

    def _check_each(self, messages: Sequence[Message]) -> str | None:
        for message in messages:
            self.check(message)
        return None


def _is_list(field: FieldDescriptor) -> bool:
    """Return whether a field is repeated. Protobuf 5 has no `is_repeated`, protobuf 7 no label."""
    return isinstance(field.default_value, list)


def _rule_of_type(field: FieldDescriptor) -> Rule:
    repeated = _is_list(field)
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return finites(LIST_ENTRIES) if repeated else finite
        case FieldDescriptor.CPPTYPE_INT64 | FieldDescriptor.CPPTYPE_UINT64:
            return numbers(LIST_ENTRIES, -MAX_EXACT) if repeated else number(-MAX_EXACT)
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            one = blob(BYTES)
        case FieldDescriptor.CPPTYPE_STRING:
            one = text(TEXT_CHARACTERS)
        case FieldDescriptor.CPPTYPE_ENUM:
            known = frozenset(field.enum_type.values_by_number if field.enum_type is not None else ())
            one = lambda value: None if value in known else f"number {value} is not known here"  # noqa: E731
        case _:
            one = anything
    return entries(LIST_ENTRIES, one) if repeated else one
