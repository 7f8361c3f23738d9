"""Strict reading of JSON texts from clients, options and models: for example call arguments and schemas. Pure.

`json.loads` alone raises RecursionError for deep texts and ValueError for long integers. It accepts values that JSON
cannot represent (half a surrogate pair, NaN, Infinity), and duplicate keys.
"""

import json
import math
import re
from itertools import accumulate
from typing import Any, NoReturn

MAX_DEPTH = 128  # maximum depth of nested lists and objects
_MAX_DIGITS = 4300  # maximum digits of an integer, Python's limit
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_STEPS = {"[": 1, "{": 1, "]": -1, "}": -1}
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
"""Escapes of a string; the group is half a surrogate pair."""


class JsonRefused(ValueError):
    """Error: JSON is unsupported or invalid. The message is the reason."""


def read_json(text: str) -> Any:
    """Return the value of a JSON text. Raises: JsonRefused."""
    if is_deep(text):
        raise JsonRefused(f"has lists and objects nested more than {MAX_DEPTH} levels deep")
    if any(match[1] for match in _ESCAPE.finditer(text)):
        raise JsonRefused("has half a surrogate pair (\\ud800 to \\udfff), which is no character")
    try:
        return json.loads(text, parse_constant=_constant, parse_float=_float, parse_int=_int, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise JsonRefused(f"is not JSON from line {error.lineno}, column {error.colno}") from error


def read_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call that a model wrote; None if they are not a JSON object.

    Half a surrogate pair becomes U+FFFD, so that a conversation that contains one can continue.
    """
    try:
        read = read_json(_ESCAPE.sub(lambda match: r"\ufffd" if match[1] else match[0], text))
    except JsonRefused:
        return None
    return read if isinstance(read, dict) else None


def is_deep(text: str) -> bool:
    """Return whether lists and objects are nested deeper than MAX_DEPTH."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    steps = (_STEPS[letter] for letter in _STRING.sub("", text) if letter in _STEPS)
    return any(depth > MAX_DEPTH for depth in accumulate(steps))


def json_type(value: object) -> str:
    """Return the JSON Schema type of a JSON value; "number" for integers too."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(members)
    if len(made) < len(members):
        names = [name for name, _ in members]
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise JsonRefused(f"has the key {twice[:64]!r} twice in one object")
    return made


def _constant(name: str) -> NoReturn:
    raise JsonRefused(f"has {name}, which is not JSON")


def _float(text: str) -> float:
    if math.isinf(number := float(text)):
        raise JsonRefused(f"has the number {text[:32]}, which is out of range")
    return number


def _int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise JsonRefused(f"has an integer of more than {_MAX_DIGITS} digits")
    return int(text)
