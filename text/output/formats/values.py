"""Arguments that a model writes as text, one after another, as the JSON object that a client gets. Pure.

The function's schema says what a text means: a string is passed on while it comes, anything else once it is whole.
"""

import json
from collections.abc import Mapping
from typing import Any

from baton.text.structured.json_text import JsonRefused, read_json

_PYTHON = {"True": "true", "False": "false", "None": "null"}


class ArgumentWriter:
    """Each of its methods returns the next part of the object."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        properties = schema.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._is_empty = True
        self._types: frozenset[str] = frozenset()
        self._text = ""  # of a value that is no plain string

    def key(self, name: str) -> str:
        """A value follows."""
        begin = "{" if self._is_empty else ", "
        self._is_empty, self._text = False, ""
        self._types = _types(self._properties.get(name))
        return f"{begin}{json.dumps(name, ensure_ascii=False)}: " + ('"' if self._is_string else "")

    def part(self, text: str) -> str:
        """Of the value."""
        if self._is_string:
            return json.dumps(text, ensure_ascii=False)[1:-1]
        self._text += text
        return ""

    def value_ends(self) -> str:
        return '"' if self._is_string else _converted(self._text, self._types)

    def cut(self) -> str:
        """Of a value that has no end, what has not gone out."""
        return self._text

    def end(self) -> str:
        return "{}" if self._is_empty else "}"

    @property
    def _is_string(self) -> bool:
        return self._types == {"string"}


def _types(schema: object) -> frozenset[str]:
    """That a value may have; empty where the schema does not say."""
    if not isinstance(schema, Mapping):
        return frozenset()
    stated = schema.get("type")
    if isinstance(stated, str):
        return frozenset({stated})
    if isinstance(stated, list):
        return frozenset(each for each in stated if isinstance(each, str))
    for several in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(several), list):
            return frozenset().union(*map(_types, schema[several]))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return frozenset(map(_type_of, values))


def _type_of(value: object) -> str:
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


def _converted(text: str, types: frozenset[str]) -> str:
    """As JSON of one of these types where it can be read so, else as a string."""
    given = _PYTHON.get(text.strip(), text.strip())
    try:
        found = _type_of(read_json(given))
    except JsonRefused:
        return json.dumps(text, ensure_ascii=False)
    allowed = types | {"number"} if "integer" in types else types
    is_meant = found in allowed if types else found != "string"
    return given if is_meant else json.dumps(text, ensure_ascii=False)
