"""What a row of the table is: figures, each with its target, and what the device itself does in the same run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

import torch

Size = TypeVar("Size")


@dataclass(frozen=True, slots=True)
class Setting:
    device: torch.device
    dry: bool  # on a CPU, at sizes of nothing: only whether it runs

    def size(self, real: Size, dry: Size) -> Size:
        return dry if self.dry else real


class Wanted(StrEnum):
    AT_LEAST = "at least"
    AT_MOST = "at most"


class Target(NamedTuple):
    wanted: Wanted
    value: float


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    value: float
    unit: str
    target: Target | None = None
    limit: str = ""  # what the device itself does, measured in the same run

    @property
    def is_met(self) -> bool | None:
        if self.target is None:
            return None
        if self.target.wanted is Wanted.AT_LEAST:
            return self.value >= self.target.value
        return self.value <= self.target.value

    def as_dict(self) -> dict[str, Any]:
        target = "" if self.target is None else f"{self.target.wanted} {self.target.value:g}"
        fields = {"name": self.name, "value": self.value, "unit": self.unit, "target": target, "limit": self.limit}
        return {**fields, "met": self.is_met}


class AbsentError(Exception):
    """Something that a row is measured with, or against, is not here; the message says what."""


class Row(NamedTuple):
    name: str
    measure: Callable[[Setting], Sequence[Figure]]
    """Raises: AbsentError."""


def at_least(value: float) -> Target:
    return Target(Wanted.AT_LEAST, value)


def at_most(value: float) -> Target:
    return Target(Wanted.AT_MOST, value)
