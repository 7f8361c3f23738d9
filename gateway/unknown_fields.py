"""Which field of a body its message does not have, and which one was probably meant. Pure."""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gateway.problem import Problem, refused

_SHOWN = 64  # characters of a name
_LIKE = 0.7  # of 1; less alike is another word


class UnknownField(NamedTuple):
    path: str
    name: str
    known: Sequence[str]  # names of the fields that there are in its place

    @property
    def problem(self) -> Problem:
        near = get_close_matches(self.name, self.known, 1, _LIKE) if len(self.name) <= _SHOWN else []
        hint = f"did you mean {near[0]}?" if near else "it is not served here"
        return refused(self.path, f"unknown field; {hint}", "unknown_field")


def unknown_field(annotation: Any, value: Any, path: str = "") -> UnknownField | None:
    """The first one, in the order of the body. `annotation`: the value's type, `path`: its place."""
    for member in _members(annotation):
        if isinstance(value, list) and get_origin(member) is list:
            places = ((get_args(member)[0], each, f"{path}[{index}]") for index, each in enumerate(value))
        elif isinstance(value, dict) and isinstance(member, type) and issubclass(member, BaseModel):
            fields = {field.alias or name: field for name, field in member.model_fields.items()}
            if not _is_meant(fields, value):
                continue
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
    """Of a union, and of unions in it; of any other type itself."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


def _is_meant(fields: dict[str, FieldInfo], value: dict[str, Any]) -> bool:
    """Whether a field that tells types of objects apart, such as `type`, is what it is in these."""
    return all(
        value[name] in get_args(field.annotation)
        for name, field in fields.items()
        if get_origin(field.annotation) is Literal and name in value
    )


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
