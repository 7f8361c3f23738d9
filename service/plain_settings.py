"""The part of pydantic and pydantic-settings that our configurations use, for machines without them: bare GPU images.

Names and behaviour are theirs; a test reads the same flags both ways. Messages are shorter.
"""

import enum
import inspect
import os
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

REQUIRED: Any = object()
TRUE, FALSE = {"1", "true", "yes", "on", "y", "t"}, {"0", "false", "no", "off", "n", "f"}
UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
AFTER = "_validates_after"
CLASS_VARIABLES = {"model_config", "model_fields", "_own_fields"}


class ValidationError(ValueError):
    def __init__(self, problems: list[dict[str, Any]]) -> None:
        super().__init__("; ".join(f"{'.'.join(problem['loc'])}: {problem['msg']}" for problem in problems))
        self._problems = problems

    def errors(self) -> list[dict[str, Any]]:
        return self._problems


@dataclass(frozen=True)
class BeforeValidator:
    func: Callable[[Any], Any]


@dataclass(frozen=True, eq=False)  # compared as itself, as part of a type
class FieldInfo:
    default: Any = REQUIRED
    description: str | None = None
    validation_alias: str | None = None
    pattern: str | None = None
    bounds: Mapping[str, float] = field(default_factory=dict)  # by gt, ge, lt, le
    annotation: Any = None
    metadata: list[Any] = field(default_factory=list)

    def is_required(self) -> bool:
        return self.default is REQUIRED

    def check(self, value: Any) -> None:
        """Raises: ValueError."""
        if value is None:
            return
        if self.pattern is not None and re.search(self.pattern, value) is None:
            raise ValueError(f"String should match pattern '{self.pattern}'")
        for name, bound in self.bounds.items():
            if not isinstance(value, str) and not _COMPARED[name](value, bound):
                raise ValueError(f"Input should be {_SAID[name]} {bound:g}")


_COMPARED: dict[str, Callable[[float, float], bool]] = {
    "gt": lambda value, bound: value > bound,
    "ge": lambda value, bound: value >= bound,
    "lt": lambda value, bound: value < bound,
    "le": lambda value, bound: value <= bound,
}
_SAID = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}


def Field(
    default: Any = REQUIRED,
    *,
    description: str | None = None,
    validation_alias: str | None = None,
    pattern: str | None = None,
    **bounds: float,
) -> Any:
    return FieldInfo(default, description, validation_alias, pattern, bounds)


def model_validator(*, mode: Literal["after"]) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """For methods that look at several fields."""

    def marked(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        setattr(function, AFTER, mode)
        return function

    return marked


class ByteSize(int):
    @classmethod
    def read(cls, value: Any) -> "ByteSize":
        if isinstance(value, int):
            return cls(value)
        found = re.fullmatch(r"\s*(\d*\.?\d+)\s*([kmgt]?)(i?)b?\s*", str(value), re.IGNORECASE)
        if found is None:
            raise ValueError("could not parse value and unit from byte string")
        base = 1024 if found[3] else 1000
        return cls(int(float(found[1]) * base ** UNITS[found[2].lower()]))


def SettingsConfigDict(**options: Any) -> dict[str, Any]:
    return options


class BaseSettings:
    """Frozen; values come from its arguments, then from variables, then from defaults; unknown ones are refused."""

    model_config: ClassVar[dict[str, Any]] = {}
    model_fields: ClassVar[dict[str, FieldInfo]] = {}
    _own_fields: ClassVar[dict[str, FieldInfo]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = {name: each for name, each in inspect.get_annotations(cls).items() if name not in CLASS_VARIABLES}
        cls._own_fields = {name: _field(annotation, vars(cls).get(name, REQUIRED)) for name, annotation in own.items()}
        for name in own.keys() & vars(cls).keys():
            delattr(cls, name)
        cls.model_fields = {}
        for base in reversed(cls.__mro__):
            cls.model_fields |= vars(base).get("_own_fields", {})

    def __init__(self, **values: Any) -> None:
        problems: list[dict[str, Any]] = []
        for name, info in type(self).model_fields.items():
            try:
                value = _convert(info.annotation, self._text(name, info, values), [*info.metadata, info])
                object.__setattr__(self, name, value)
            except ValueError as error:
                problems.append({"loc": (info.validation_alias or name,), "msg": str(error)})
        problems += [{"loc": (name,), "msg": "Extra inputs are not permitted"} for name in values]
        if problems:
            raise ValidationError(problems)
        for _, method in inspect.getmembers(type(self), lambda each: hasattr(each, AFTER)):
            try:
                method(self)
            except ValueError as error:
                raise ValidationError([{"loc": (), "msg": f"Value error, {error}"}]) from error

    def _text(self, name: str, info: FieldInfo, values: dict[str, Any]) -> Any:
        """As it was given, or the default; takes it out of `values`."""
        for key in (info.validation_alias, name):
            if key is not None and key in values:
                return values.pop(key)
        variable = info.validation_alias or f"{self.model_config.get('env_prefix', '')}{name.upper()}"
        if os.environ.get(variable):
            return os.environ[variable]
        if info.is_required():
            raise ValueError("Field required")
        return info.default

    def __setattr__(self, name: str, value: Any) -> None:
        raise ValidationError([{"loc": (name,), "msg": "Instance is frozen"}])

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(tuple(sorted(vars(self).items(), key=lambda item: item[0])))


def _field(annotation: Any, assigned: Any) -> FieldInfo:
    info = assigned if isinstance(assigned, FieldInfo) else FieldInfo(assigned)
    if get_origin(annotation) is Annotated:
        annotation, *marks = get_args(annotation)
        return replace(info, annotation=annotation, metadata=marks)
    return replace(info, annotation=annotation)


def _convert(wanted: Any, value: Any, marks: Sequence[Any] = ()) -> Any:
    """Raises: ValueError."""
    if get_origin(wanted) is Annotated:
        wanted, *marks = get_args(wanted)
    for mark in marks:
        if isinstance(mark, BeforeValidator):
            value = mark.func(value)
    converted = _plain(wanted, value)
    for mark in marks:
        if isinstance(mark, FieldInfo):
            mark.check(converted)
    return converted


def _plain(wanted: Any, value: Any) -> Any:
    origin, choices = get_origin(wanted), get_args(wanted)
    if origin is Literal:
        if value not in choices:
            raise ValueError(f"Input should be {' or '.join(map(repr, choices))}")
        return value
    if origin in (Union, types.UnionType):
        return _one_of(choices, value)
    if wanted is type(None):
        if value is not None:
            raise ValueError("Input should be None")
        return None
    if wanted is bool:
        if not isinstance(value, bool) and str(value).lower() not in TRUE | FALSE:
            raise ValueError("Input should be a valid boolean")
        return value if isinstance(value, bool) else str(value).lower() in TRUE
    if wanted is ByteSize:
        return ByteSize.read(value)
    if wanted in (int, float, str, Path) or (isinstance(wanted, type) and issubclass(wanted, enum.Enum)):
        if value is None:
            raise ValueError(f"Input should be a valid {wanted.__name__}")
        return wanted(value)
    if not isinstance(value, origin or wanted):  # a collection, which its own validator has made
        raise ValueError(f"Input should be a valid {(origin or wanted).__name__}")
    return value


def _one_of(choices: tuple[Any, ...], value: Any) -> Any:
    problems = []
    for choice in choices:
        try:
            return _convert(choice, value)
        except ValueError as error:
            problems.append(str(error))
    raise ValueError("; ".join(problems))
