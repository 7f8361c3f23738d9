"""A body to the message that it is, or to a problem that names its error. Pure.

The time is bounded by the counts of json_size: `is_small` is true for bodies that an event loop has time for.
"""

from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from gateway.json_size import JsonSize, json_size
from gateway.problem import Problem
from gateway.unknown_fields import unknown_field

Message = TypeVar("Message", bound=BaseModel)

SMALL_BYTES = 1 << 16
_SMALL_WEIGHT = 1 << 11
_VALUES_PER_TEXT = 4  # a number is as much work as a quarter of a text


def is_small(size: JsonSize) -> bool:
    """Whether a body of at most SMALL_BYTES is parsed in a millisecond or two, or found wrong in twice that."""
    return size.texts + size.containers + size.values // _VALUES_PER_TEXT <= _SMALL_WEIGHT


def parse(message_type: type[Message], body: bytes) -> Message:
    """Raises: Problem that names the first field that is wrong."""
    if (excess := json_size(body).excess) is not None:
        raise Problem(HTTPStatus.BAD_REQUEST, f"the body has {excess}", code="body_too_large")
    try:
        return message_type.model_validate_json(body)
    except ValidationError as error:
        invalid = error
    try:
        sent = from_json(body)
    except ValueError as error:
        raise Problem(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {error}", code="invalid_json") from error
    # A field by a wrong name is more often the mistake than that the right one is missing.
    if (unknown := unknown_field(message_type, sent)) is not None:
        raise unknown.problem
    # The input is left out: it may be a prompt.
    errors = invalid.errors(include_url=False, include_context=False, include_input=False)
    # Of the members of a union, the one that came furthest is probably the intended one.
    known = [each for each in errors if each["type"] != "extra_forbidden"] or errors
    path, detail = max(((_path(each, sent), each) for each in known), key=lambda found: found[0].progress)
    message = f"{path.text}: {detail['msg']}" if path.text else detail["msg"]
    raise Problem(HTTPStatus.BAD_REQUEST, message, path.text or None, str(detail["type"]))


class _Path(NamedTuple):
    """`messages[0].role`; `progress` grows with depth, and with the place in a list."""

    text: str
    progress: tuple[int, ...]


def _path(error: ErrorDetails, value: Any) -> _Path:
    """Where pydantic found the error, without the names that it gives to the members of a union."""
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
    return _Path(path.removeprefix("."), progress)
