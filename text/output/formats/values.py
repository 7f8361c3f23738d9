"""Conversion of arguments that a model writes as text, one by one, to a JSON object. Pure.

The function's schema gives the type of each argument. Strings are sent while they stream, other values once complete.
"""

import json
from collections.abc import Mapping
from typing import Any

from baton.text.structured.json_text import JsonRefused, json_type, read_json

_PYTHON = {"True": "true", "False": "false", "None": "null"}


class ArgumentWriter:
    """Writer of the JSON object of arguments; each method returns the next part of the object's text."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        properties = schema.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._is_empty = True
        self._types: frozenset[str] = frozenset()
        self._text = ""  # text of a value that is not a string

    def key(self, name: str) -> str:
        """Write a key, before its value."""
        begin = "{" if self._is_empty else ", "
        self._is_empty, self._text = False, ""
        self._types = _types(self._properties.get(name))
        return f"{begin}{json.dumps(name, ensure_ascii=False)}: " + ('"' if self._is_string else "")

    def part(self, text: str) -> str:
        """Write a part of the value."""
        if self._is_string:
            return json.dumps(text, ensure_ascii=False)[1:-1]
        self._text += text
        return ""

    def value_ends(self) -> str:
        return '"' if self._is_string else _converted(self._text, self._types)

    def cut(self) -> str:
        """Return the unsent text of a value that is incomplete because the answer ended."""
        return self._text

    def end(self) -> str:
        return "{}" if self._is_empty else "}"

    @property
    def _is_string(self) -> bool:
        return self._types == {"string"}


def _types(schema: object) -> frozenset[str]:
    """Return the types that a value may have; empty if the schema states none."""
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
    return frozenset(map(json_type, values))


def _converted(text: str, types: frozenset[str]) -> str:
    """Return the text as JSON: unchanged if it is JSON of one of these `types`, else as a string."""
    given = _PYTHON.get(text.strip(), text.strip())
    try:
        found = json_type(read_json(given))
    except JsonRefused:
        return json.dumps(text, ensure_ascii=False)
    allowed = types | {"number"} if "integer" in types else types
    is_meant = found in allowed if types else found != "string"
    return given if is_meant else json.dumps(text, ensure_ascii=False)
