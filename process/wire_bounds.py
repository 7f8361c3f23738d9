"""Bounds of a message from another process: one walk over its fields, before anything is made of them.

A field without a rule of its own has the rule of its type: numbers are finite and at most MAX_EXACT, enumerations are
known, texts and bytes are short, lists are at most LIST_ENTRIES long. So a new field is bounded from the start. The
walk costs as much as the message is large.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MAX_EXACT = (1 << 53) - 1
"""The largest integer that numbers of Lua and JavaScript keep exactly: so far versions, epochs and counters go."""
TEXT_CHARACTERS = 256
BYTES = 64
LIST_ENTRIES = 4096
_IPV6 = r"\[[0-9A-Fa-f:.]{2,45}(?:%[\w.-]{1,16})?\]"
_NAME_OR_IPV4 = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252}[A-Za-z0-9_])?"
ENDPOINT = re.compile(rf"(?:{_IPV6}|{_NAME_OR_IPV4}):([0-9]{{1,5}})")
MAX_PORT = 65_535

Rule = Callable[[Any], str | None]
"""The end of an error message for a value out of bounds; None for a good one."""


class OutOfBounds(ValueError):
    """Names the field, its bound and, of a number, its value."""


def anything(value: object) -> None:
    """Bounded by its type alone."""


def number(least: float = 0, most: float = MAX_EXACT) -> Rule:
    """NaN is in no range."""

    def fault(value: float) -> str | None:
        return None if least <= value <= most else f"must be from {least} to {most}, not {value}"

    return fault


def finite(value: float) -> str | None:
    return None if math.isfinite(value) else f"must be a finite number, not {value}"


def numbers(entries: int, least: float = 0, most: float = MAX_EXACT) -> Rule:
    """A list of at most so many."""

    def fault(values: Sequence[float]) -> str | None:
        if len(values) > entries:
            return f"at most {entries} entries, not {len(values)}"
        if len(values) and not least <= min(values) <= max(values) <= most:
            return f"each must be from {least} to {most}"
        return None

    return fault


def finites(entries: int) -> Rule:
    """A list of at most so many finite numbers. NaN need be neither the least nor the most of them."""

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
            return f"{value!r} has a character that it may not have"
        return None

    return fault


def size(*allowed: int) -> Rule:
    """Bytes, of one of these lengths."""

    def fault(value: bytes) -> str | None:
        return None if len(value) in allowed else f"must be {' or '.join(map(str, allowed))} bytes, not {len(value)}"

    return fault


def blob(most: int) -> Rule:
    """Bytes, at most so many."""
    return lambda value: None if len(value) <= most else f"at most {most} bytes, not {len(value)}"


def entries(most: int, each: Rule = anything) -> Rule:
    """A list, or the keys of a map."""

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
    """Check host:port, an IPv6 host in brackets: nothing else that gRPC would take for an address, such as
    unix:path.
    """
    match = ENDPOINT.fullmatch(value)
    if match is None or not 0 < int(match[1]) <= MAX_PORT:
        return f"must be host:port, not {value[:TEXT_CHARACTERS]!r}"
    return None


class Bounds:
    """Bounds of messages. `rules`: by `Message.field`; of a list of messages, how many there may be."""

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self._rules = rules
        self._plans: dict[str, dict[int, Rule]] = {}  # by message, then by number of the field

    def check(self, message: Message | None) -> None:
        """Check a message. None is one that gRPC could not read. Raises: OutOfBounds."""
        if message is None:
            raise OutOfBounds("message: cannot be read")
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
    """Protobuf 5 has a label for it and no `is_repeated`, protobuf 7 has no label."""
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
