"""Conversion of JSON schemas to schemas that a grammar enforces completely. Pure.

Annotations are dropped; they include unknown keywords (JSON Schema 2020-12) and formats without a grammar. A keyword
that cannot be enforced is rejected with its JSON pointer. Members of `anyOf` that cannot be enforced are dropped.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, permutations
from typing import Any
from urllib.parse import unquote

from baton.text.structured.json_text import json_type

Schema = Mapping[str, Any] | bool
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats of strings that the library enforces."""
MOST_LISTS = 400
"""Maximum number of lists of distinct values that are enumerated for `uniqueItems`."""
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_UNSUPPORTED = (
    *("not", "if", "contains", "dependentRequired", "dependentSchemas", "dependencies"),
    *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
)
_MEMBERS = ("anyOf", "oneOf", "allOf")
_LOOKS = re.compile(r"\(\?<?[=!]|(?<!\\)(?:\\\\)*\\[1-9k]")
"""Lookaround and back references in a pattern."""
_ATOM = r"[A-Za-z0-9_'+\-]"
_SAME_PATTERNS = {
    # zod's pattern of an e-mail address, with lookaheads that exclude a leading dot and two adjacent dots.
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        rf"^({_ATOM}+\.)*{_ATOM}*[A-Za-z0-9_+\-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{{2,}}$"
    ),
}
"""Common patterns with lookaround, and equivalent ones without."""
_NAME_FORMATS = {
    "uuid": r"^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "date": r"^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])$",
}
"""Patterns by format, for `propertyNames` with a format."""


class SchemaRefused(ValueError):
    """Error: a schema cannot be enforced. The message has the keyword's JSON pointer and the reason."""

    def __init__(self, pointer: str, reason: str) -> None:
        super().__init__(f"#{pointer}: {reason}")


def enforceable_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return an enforceable schema that allows exactly the same answers. Raises: SchemaRefused."""
    return _SchemaConverter(schema).converted()


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and value == int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_type(value: Any) -> bool:
    given = value if isinstance(value, list) else [value]
    return bool(given) and all(isinstance(each, str) and each in _TYPES for each in given)


_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_is_type, f"must be of {', '.join(sorted(_TYPES))}, or a list of them"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "must be a list that is not empty"),
    "const": (lambda value: True, ""),
    "required": (_is_texts, "must be a list of texts"),
    "pattern": (lambda value: isinstance(value, str), "must be a text"),
    "format": (lambda value: isinstance(value, str), "must be a text"),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "must be a number above 0"),
    **dict.fromkeys(_COUNTS, (_is_count, "must be a whole number from 0")),
    **dict.fromkeys(_BOUNDS, (_is_number, "must be a number")),
}
"""Keywords without nested schemas, with a check of their values and its error."""


class _SchemaConverter:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._names: dict[str, str] = {}  # name of the definition, by JSON pointer
        self._converted: dict[str, Schema] = {}  # converted definition, by name

    def converted(self) -> dict[str, Any]:
        root, pointer = self._root, ""
        followed = set[str]()
        while isinstance(ref := root.get("$ref"), str) and not self._asserts(root) - {"$ref"} and ref not in followed:
            followed.add(ref)
            target, pointer = self._target(ref, pointer)
            if not isinstance(target, Mapping):
                break
            root = target
        made = self._object(root, pointer)
        while waiting := [pointer for pointer, name in self._names.items() if name not in self._converted]:
            for pointer in waiting:
                target, _ = self._target(f"#{pointer}", pointer)
                self._converted[self._names[pointer]] = self._schema(target, pointer)
        return {**made, "$defs": self._converted} if self._converted else made

    def _schema(self, schema: Any, pointer: str) -> Schema:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise SchemaRefused(pointer, "must be a schema: an object, true or false")
        return self._object(schema, pointer)

    def _object(self, schema: Mapping[str, Any], pointer: str) -> dict[str, Any]:
        for keyword in _UNSUPPORTED:
            if keyword in schema:
                raise SchemaRefused(f"{pointer}/{keyword}", "cannot be enforced")
        if "$id" in schema and schema is not self._root:
            raise SchemaRefused(f"{pointer}/$id", "is supported only at the root")
        made: dict[str, Any] = {}
        for keyword, value in schema.items():  # the order of properties is kept
            if keyword in _VALUES:
                is_good, wanted = _VALUES[keyword]
                if not is_good(value):
                    raise SchemaRefused(f"{pointer}/{keyword}", wanted)
                made[keyword] = int(value) if keyword in _COUNTS else value
            elif keyword in ("properties", "patternProperties"):
                made[keyword] = self._mapping(value, f"{pointer}/{keyword}")
            elif keyword in _MEMBERS:
                made[keyword] = self._members(keyword, value, f"{pointer}/{keyword}")
            elif keyword == "additionalProperties":
                made[keyword] = self._schema(value, f"{pointer}/{keyword}")
            elif keyword == "$ref":
                made[keyword] = self._reference(value, pointer)
        self._enforce_one_of(made, schema, pointer)
        self._enforce_texts(made, pointer)
        self._enforce_lists(made, schema, pointer)
        self._enforce_names(made, schema, pointer)
        _enforce_counts(made, pointer)
        return made

    def _mapping(self, value: Any, pointer: str) -> dict[str, Schema]:
        if not isinstance(value, Mapping):
            raise SchemaRefused(pointer, "must be an object")
        return {name: self._schema(each, f"{pointer}/{_step(name)}") for name, each in value.items()}

    def _list(self, value: Any, pointer: str) -> list[Schema]:
        if not isinstance(value, list) or not value:
            raise SchemaRefused(pointer, "must be a list of schemas that is not empty")
        return [self._schema(each, f"{pointer}/{place}") for place, each in enumerate(value)]

    def _members(self, keyword: str, value: Any, pointer: str) -> list[Schema]:
        if keyword != "anyOf" or not isinstance(value, list) or len(value) < 2:
            return self._list(value, pointer)
        converted, refusals = list[Schema](), list[SchemaRefused]()
        for place, each in enumerate(value):
            try:
                converted.append(self._schema(each, f"{pointer}/{place}"))
            except SchemaRefused as refusal:
                refusals.append(refusal)
        if not converted:
            raise refusals[0]
        return converted

    # References:

    def _reference(self, ref: Any, pointer: str) -> str:
        _, target = self._target(ref, pointer)
        if target not in self._names:
            last = target.rpartition("/")[2] or "root"
            taken = self._names.values()
            is_plain = re.fullmatch(r"[\w.\-]+", last, re.ASCII) is not None and last not in taken
            self._names[target] = last if is_plain else f"definition-{len(self._names)}"
        return f"#/$defs/{self._names[target]}"

    def _target(self, ref: Any, pointer: str) -> tuple[Any, str]:
        """Return the schema that `ref` refers to, and its JSON pointer. Raises: SchemaRefused."""
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise SchemaRefused(f"{pointer}/$ref", 'must be "#" or begin with "#/": only the schema itself is searched')
        found: Any = self._root
        for step in unquote(ref).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isascii() and name.isdigit() and int(name) < len(found):
                found = found[int(name)]
            else:
                raise SchemaRefused(f"{pointer}/$ref", f"the schema has no {ref[:100]}")
        return found, unquote(ref)[1:]

    def _resolved(self, schema: Any) -> Any:
        """Return the schema that remains after following `$ref` repeatedly."""
        for _ in range(100):
            if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
                break
            schema, _ = self._target(schema["$ref"], "")
        return schema

    def _asserts(self, schema: Mapping[str, Any]) -> set[str]:
        known = {*_VALUES, *_MEMBERS, *_UNSUPPORTED, "properties", "patternProperties", "additionalProperties", "$ref"}
        return schema.keys() & (known | {"items", "prefixItems", "uniqueItems", "propertyNames"})

    # Keywords that are converted, not copied:

    def _enforce_one_of(self, made: dict[str, Any], schema: Mapping[str, Any], pointer: str) -> None:
        """Convert oneOf to anyOf. Raises: SchemaRefused if one value could match two members."""
        if "oneOf" not in made:
            return
        members = [self._resolved(member) for member in schema["oneOf"]]
        if not all(self._exclude_each_other(*pair) for pair in combinations(members, 2)):
            raise SchemaRefused(f"{pointer}/oneOf", "cannot be enforced, unless no two members can be true; use anyOf")
        members = made.pop("oneOf")
        if "anyOf" in made:
            made["allOf"] = [*made.get("allOf", ()), {"anyOf": members}]
        else:
            made["anyOf"] = members

    def _exclude_each_other(self, one: Any, other: Any) -> bool:
        """Return whether no value can match both schemas, as far as types or a common property's values show it."""
        if not isinstance(one, Mapping) or not isinstance(other, Mapping):
            return False
        kinds = self._kinds(one), self._kinds(other)
        if not kinds[0] & kinds[1]:
            return True
        if kinds[0] | kinds[1] != {"object"}:
            return False
        both = set(one.get("required", ())) & set(other.get("required", ()))
        for name in both & one.get("properties", {}).keys() & other.get("properties", {}).keys():
            values = self._values(one["properties"][name]), self._values(other["properties"][name])
            if None not in values and not any(_is_among(each, values[1] or ()) for each in values[0] or ()):
                return True
        return False

    def _kinds(self, schema: Mapping[str, Any]) -> set[str]:
        """Return the types that a value of the schema may have."""
        stated = schema.get("type", sorted(_TYPES))
        kinds = set(stated if isinstance(stated, list) else [stated])
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            found = set(map(json_type, values))
            kinds &= found | ({"integer"} if "number" in found else set())
        return kinds | ({"integer"} if "number" in kinds else set())

    def _enforce_texts(self, made: dict[str, Any], pointer: str) -> None:
        if "pattern" in made:
            made["pattern"] = _SAME_PATTERNS.get(made["pattern"], made["pattern"])
        patterns = {"pattern": made["pattern"]} if "pattern" in made else {}
        for name in made.get("patternProperties", ()):
            patterns[f"patternProperties/{_step(name)}"] = name
        for place, pattern in patterns.items():
            if _LOOKS.search(pattern):
                raise SchemaRefused(f"{pointer}/{place}", "lookaround and references to groups cannot be enforced")
        if made.get("format") not in FORMATS:
            made.pop("format", None)

    def _enforce_lists(self, made: dict[str, Any], schema: Mapping[str, Any], pointer: str) -> None:
        items, prefix = schema.get("items"), schema.get("prefixItems")
        prefix_field = "prefixItems"
        if isinstance(items, list):  # syntax of JSON Schema drafts before 2020-12
            prefix, items, prefix_field = items or None, schema.get("additionalItems"), "items"
        if prefix is not None:
            made["prefixItems"] = self._list(prefix, f"{pointer}/{prefix_field}")
        if items is not None:
            made["items"] = self._schema(items, f"{pointer}/items")
        if schema.get("uniqueItems", False) is False or made.get("maxItems", 2) < 2:
            return
        values = None if prefix is not None else self._values(items)
        lists = None if values is None else _distinct(values, made.get("minItems", 0), made.get("maxItems"))
        if not lists:
            wanted = "cannot be enforced, unless items are an enum of few values or maxItems is 1"
            raise SchemaRefused(f"{pointer}/uniqueItems", wanted)
        for keyword in ("items", "minItems", "maxItems"):
            made.pop(keyword, None)
        made["enum"] = [each for each in made.get("enum", lists) if each in lists]

    def _values(self, schema: Any) -> list[Any] | None:
        """Return all values that a schema lists; None if it does not list values, or has other constraints."""
        schema = self._resolved(schema)
        if not isinstance(schema, Mapping):
            return None
        asserts = self._asserts(schema)
        if "const" in schema and asserts <= {"const", "type"}:
            return [schema["const"]]
        if isinstance(schema.get("enum"), list) and asserts <= {"enum", "type"}:
            return [each for place, each in enumerate(schema["enum"]) if not _is_among(each, schema["enum"][:place])]
        return [False, True] if schema.get("type") == "boolean" and asserts == {"type"} else None

    def _enforce_names(self, made: dict[str, Any], schema: Mapping[str, Any], pointer: str) -> None:
        names = self._resolved(schema.get("propertyNames", True))
        asserts = self._asserts(names) if isinstance(names, Mapping) else set()
        if names is True or (
            isinstance(names, Mapping) and asserts <= {"type"} and names.get("type") in (None, "string")
        ):
            return
        place = f"{pointer}/propertyNames"
        values = self._values(names)
        if values is not None and "patternProperties" not in made:
            open_to, declared = made.get("additionalProperties", True), made.get("properties", {})
            made["properties"] = {name: declared.get(name, open_to) for name in values if isinstance(name, str)}
            made["additionalProperties"] = False
            return
        pattern = _name_pattern(names) if isinstance(names, Mapping) else None
        if pattern is None or asserts - {"type", "pattern", "format", "minLength", "maxLength"}:
            raise SchemaRefused(place, "is enforced only as an enum, a pattern, or a length")
        if made.get("properties") or made.get("patternProperties") or made.get("required") or _LOOKS.search(pattern):
            raise SchemaRefused(place, "is enforced only without properties, patternProperties and required")
        made["patternProperties"] = {pattern: made.pop("additionalProperties", True)}
        made["additionalProperties"] = False


def _enforce_counts(made: dict[str, Any], pointer: str) -> None:
    """Convert minProperties and maxProperties to `required` and `anyOf`.

    Only names in `properties` can be counted, because a grammar allows other names more than once.
    """
    if "minProperties" not in made and "maxProperties" not in made:
        return
    required, declared = set(made.get("required", ())), set(made.get("properties", {}))
    optional = declared - required
    is_closed = made.get("additionalProperties", True) is False and not made.get("patternProperties")
    least, most = made.get("minProperties", 0), made.get("maxProperties", math.inf)
    if least <= len(required):
        made.pop("minProperties", None)
        least = 0
    if is_closed and most >= len(declared | required):
        made.pop("maxProperties", None)
        most = math.inf
    if not least and most == math.inf:
        return
    keyword = "minProperties" if least else "maxProperties"
    if most < max(least, len(required)):
        raise SchemaRefused(
            f"{pointer}/{keyword}", "no answer can have this number of properties with all required ones"
        )
    if made.keys() & {"$ref", *_MEMBERS}:
        raise SchemaRefused(f"{pointer}/{keyword}", "cannot be enforced together with $ref, anyOf, oneOf or allOf")
    if is_closed:
        made.pop("minProperties", None), made.pop("maxProperties", None)
        chosen = [
            {*required, *each}
            for count in range(max(0, least - len(required)), len(optional) + 1)
            if count + len(required) <= most
            for each in combinations(sorted(optional, key=list(made["properties"]).index), count)
            if most != math.inf or count == least - len(required)
        ]
        if not 0 < len(chosen) <= MOST_LISTS:
            raise SchemaRefused(f"{pointer}/{keyword}", "cannot be enforced with this many properties")
        # An answer has all names of one set in `chosen`; with maxProperties, it has no other optional names.
        made["anyOf"] = [
            {"required": [name for name in (*made["properties"], *required) if name in names]}
            | ({"properties": dict.fromkeys(optional - names, False)} if most != math.inf else {})
            for names in chosen
        ]
    elif optional or least > len(required) + 1:
        raise SchemaRefused(f"{pointer}/{keyword}", "cannot be enforced for names that are not declared as properties")


def _distinct(values: Sequence[Any], least: int, most: int | None) -> list[list[Any]] | None:
    """Return all lists of distinct values. If these are too many, keep the given order; None if still too many."""
    counts = range(least, min(len(values), len(values) if most is None else most) + 1)
    for made, number in ((permutations, math.perm), (combinations, math.comb)):
        if sum(number(len(values), count) for count in counts) <= MOST_LISTS:
            return [list(each) for count in counts for each in made(values, count)]
    return None


def _is_among(value: Any, others: Sequence[Any]) -> bool:
    """Return whether `others` contains a JSON value. Unlike in Python, true and 1 differ."""
    return any(json.dumps(value, sort_keys=True) == json.dumps(other, sort_keys=True) for other in others)


def _name_pattern(names: Mapping[str, Any]) -> str | None:
    if isinstance(names.get("pattern"), str):
        return None if names.keys() & {"minLength", "maxLength"} else str(names["pattern"])
    if _is_count(names.get("minLength", 0)) and _is_count(names.get("maxLength", 0)):
        least, most = int(names.get("minLength", 0)), names.get("maxLength", "")
        if least or most != "":
            return f"^(?s:.{{{least},{most}}})$"
    return _NAME_FORMATS.get(names.get("format", ""), r"(?s:.*)")


def _step(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
