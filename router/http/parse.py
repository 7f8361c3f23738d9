"""Parsing of bodies into messages. Errors name the invalid field, and for an unknown field a similar known one. Pure.

Parsing blocks the event loop, and with it the tokens of all clients. Its time is bounded by limits on the counts of
`json_size`; only bodies for which `is_small` is true may be parsed on the event loop.
"""

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from http import HTTPStatus
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, from_json

from baton.router.http.dialects import OWN_TAG, UNREAD_CONTENT
from baton.router.http.edge.problem import Problem, refused

MAX_VALUES = (1 << 17) + (1 << 12)
"""Maximum number of elements in a body: a prompt of 128 Ki token ids and other fields, parsed in 10 ms."""
MAX_TEXTS = 1 << 14
"""Maximum number of texts in a body, including keys. A conversation has four or more per message."""
MAX_CONTAINERS = 1 << 13
_SHOWN = 64  # maximum number of characters of an unknown name that an error shows
_LIKE = 0.7  # minimum similarity, from 0 to 1, of a known name that an error suggests


class JsonSize(NamedTuple):
    """Counts of a body's elements. In a body that is not valid JSON, at least the valid beginning is counted."""

    values: int
    texts: int
    containers: int  # number of lists and objects

    @property
    def excess(self) -> str | None:
        """Return the excess of the body, such as "more than 16384 texts and keys"; None if it is within the limits."""
        for counted, most, name in (
            (self.texts, MAX_TEXTS, "texts and keys"),
            (self.containers, MAX_CONTAINERS, "lists and objects"),
            (self.values, MAX_VALUES, "elements"),
        ):
            if counted > most:
                return f"more than {most} {name}"
        return None


def json_size(body: bytes) -> JsonSize:
    """Count the elements of a body before it is parsed. That takes a few milliseconds for 4 MB.

    The time of parsing depends on the number of values far more than on their size: 4 MB take 6 ms as one text, and
    500 ms as empty lists or short messages. If there are too many texts, nothing else is counted.
    """
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    texts = plain.count(b'"') // 2
    if texts > MAX_TEXTS:
        return JsonSize(0, texts, 0)
    outside = b"".join(plain.split(b'"')[::2])
    return JsonSize(outside.count(b",") + 1, texts, outside.count(b"[") + outside.count(b"{"))


class UnknownField(NamedTuple):
    path: str
    name: str
    known: Sequence[str]  # names of the fields that are allowed in that object

    @property
    def problem(self) -> Problem:
        near = get_close_matches(self.name, self.known, 1, _LIKE) if len(self.name) <= _SHOWN else []
        hint = f"did you mean {near[0]}?" if near else "this route does not have it"
        return refused(self.path, f"unknown field; {hint}", "unknown_field")


def unknown_field(annotation: Any, value: Any, path: str = "") -> UnknownField | None:
    """Return the first field of `value` that its declared type, `annotation`, does not have."""
    for member in _meant(list(_members(annotation)), value):
        if isinstance(value, list) and get_origin(member) is list:
            places = ((get_args(member)[0], each, f"{path}[{index}]") for index, each in enumerate(value))
        elif isinstance(value, dict) and isinstance(member, type) and issubclass(member, BaseModel):
            fields = _fields(member)
            unknown = next((name for name in value if name not in fields), None)
            if unknown is not None:
                return UnknownField(_joined(path, unknown[:_SHOWN]), unknown, list(fields))
            places = ((fields[name].annotation, each, _joined(path, name)) for name, each in value.items())
        else:
            continue
        for place in places:
            if (found := unknown_field(*place)) is not None:
                return found
    return None


def _members(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union, including those of unions in it. For any other type, yield the type itself."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


def _meant(members: list[Any], value: Any) -> list[Any]:
    """Return the types that a value probably should have: for an object, the type that has most of its fields.

    Types that contradict a literal in it, such as `type`, are excluded.
    """
    models = [each for each in members if isinstance(each, type) and issubclass(each, BaseModel)]
    if not isinstance(value, dict) or not models:
        return members
    allowed = [each for each in models if _is_meant(_fields(each), value)]
    return [max(allowed, key=lambda each: len(_fields(each).keys() & value.keys()))] if allowed else []


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _is_meant(fields: dict[str, FieldInfo], value: dict[str, Any]) -> bool:
    """Return whether the literals in the value, such as `type`, are allowed by these fields of an object type."""
    return all(
        value[name] in get_args(field.annotation)
        for name, field in fields.items()
        if get_origin(field.annotation) is Literal and name in value
    )


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


Message = TypeVar("Message", bound=BaseModel)

SMALL_BYTES = 1 << 16
_SMALL_WEIGHT = 1 << 11
_VALUES_PER_TEXT = 4  # number of values that take as long to parse as one text


def is_small(size: JsonSize) -> bool:
    """Return whether a body of at most SMALL_BYTES can be parsed in 1 to 2 ms, or rejected in twice that time."""
    return size.texts + size.containers + size.values // _VALUES_PER_TEXT <= _SMALL_WEIGHT


def parse(message_type: type[Message], body: bytes) -> Message:
    """Parse and validate a body. Raises: Problem that names an invalid field."""
    if (excess := json_size(body).excess) is not None:
        raise Problem(HTTPStatus.BAD_REQUEST, f"the body has {excess}", code="body_too_large")
    try:
        return message_type.model_validate_json(body)
    except ValidationError as error:
        invalid = error
    try:
        sent = from_json(body)
    except ValueError as error:
        raise Problem(HTTPStatus.BAD_REQUEST, f"the body is not JSON{place_of(error)}", code="invalid_json") from error
    # Unknown fields are reported first: a misspelled field is a more likely mistake than a missing one.
    if (unknown := unknown_field(message_type, sent)) is not None:
        raise unknown.problem
    # Errors leave out the input, since it may be a prompt.
    errors = invalid.errors(include_url=False, include_input=False)
    # Each member of a union has errors. The member whose validation got furthest is probably the intended one.
    known = [each for each in errors if each["type"] != "extra_forbidden"] or errors
    found = [(_path(each, sent), each) for each in known]
    path, detail = max(found, key=lambda one: one[0].progress)
    if path.text.endswith(".type") and (unread := UNREAD_CONTENT.get(str(path.value))) is not None:
        raise refused(path.text, f"{unread} are not supported: the model reads text only", "unread_content")
    wanted = _wanted([_words(each) for place, each in found if place == path])
    message = f"{path.text}: {wanted}" if path.text else wanted
    raise Problem(HTTPStatus.BAD_REQUEST, message, path.text or None, str(detail["type"]))


_PLACE = re.compile(r"line (\d+) column (\d+)$")
_MUST_BE = "must be "
_WORDS = {
    "missing": "is required",
    **dict.fromkeys(("string_type", "string_sub_type", "string_unicode"), "must be a text"),
    **dict.fromkeys(("int_type", "int_from_float", "int_parsing_size"), "must be a whole number"),
    **dict.fromkeys(("float_type", "finite_number"), "must be a number"),
    "bool_type": "must be true or false",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "must be an object"),
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "string_too_long": "must be at most {max_length} characters",
    "too_long": "must be at most {max_length} entries",
    "union_tag_not_found": "is required",
}
"""Texts of errors by pydantic's type of error. They replace pydantic's own texts, which are for programmers."""


def place_of(error: ValueError) -> str:
    """Return the position from which a text is not valid JSON, as words for an error; empty if it is unknown."""
    found = _PLACE.search(str(error))
    return f" from line {found[1]}, column {found[2]}" if found else ""


def _words(error: ErrorDetails) -> str:
    if error["type"] == "union_tag_invalid":
        tags = error["ctx"]["expected_tags"].split(", ")
        return f"{_MUST_BE}one of {', '.join(tag for tag in tags if tag != OWN_TAG)}"
    words = _WORDS.get(error["type"])
    if words is not None:
        return words.format(**error.get("ctx", {}))
    return error["msg"] if error["type"] in ("not_served", "unknown_kind") else "is not valid"


def _wanted(messages: Sequence[str]) -> str:
    """Return one text with the requirements of all members of a union; if they cannot be joined, the first."""
    if all(each.startswith(_MUST_BE) for each in messages):
        return _MUST_BE + ", or ".join(dict.fromkeys(each.removeprefix(_MUST_BE) for each in messages))
    return messages[0]


class _Path(NamedTuple):
    """Path of a field, such as `messages[0].role`. `progress` orders paths by how far the validation got."""

    text: str
    progress: tuple[int, ...]
    value: Any  # value of the field; of the object that lacks it if it is missing


def _path(error: ErrorDetails, value: Any) -> _Path:
    """Return the path of the field that an error is about, without pydantic's names of union members."""
    path = ""
    progress: tuple[int, ...] = ()
    location = error["loc"]
    for number, step in enumerate(location, 1):
        if isinstance(step, int) and isinstance(value, list) and step < len(value):
            path, value, progress = f"{path}[{step}]", value[step], (*progress, step)
        elif isinstance(step, str) and isinstance(value, dict) and step in value:
            path, value, progress = f"{path}.{step}", value[step], (*progress, 0)
        elif isinstance(step, str) and error["type"] == "missing" and number == len(location):
            path, progress = f"{path}.{step}", (*progress, 0)
    if error["type"].startswith("union_tag_"):
        named = error["ctx"]["discriminator"].strip("'")
        path = f"{path}.{'type' if named.endswith('()') else named}"
        value = error["ctx"].get("tag")
    return _Path(path.removeprefix("."), progress, value)
