"""What an answer is taken apart into, and what takes it apart. Pure."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the arguments, by function: of all that the request shows to the model."""


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The `index`-th call of the answer."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    arguments: str


Piece = str | CallStart | CallArguments
"""A text is content of the answer."""
OutputPiece = Piece | Thought


class ToolParser(Protocol):
    @property
    def calls(self) -> int:
        """Calls that have begun."""

    @property
    def thinks(self) -> bool | None:
        """What comes next is a thought. None: a format that has no thoughts of its own."""

    def push(self, text: str) -> Sequence[OutputPiece]: ...

    def finish(self) -> Sequence[OutputPiece]:
        """The pieces that were held back, at the end of the answer."""


def new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def beginning_of(tag: str, text: str) -> int:
    """How many characters at the end of `text` may become the tag."""
    longest = min(len(tag) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(tag[:length])), 0)
