"""Pieces into which an answer is parsed (text, reasoning, calls), and the interface of parsers. Pure."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the arguments, by function, of all functions in the request."""


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Start of the `index`-th call of the answer."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    arguments: str


Piece = str | CallStart | CallArguments
"""Text of the answer, or a part of a call."""
OutputPiece = Piece | Thought


class ToolParser(Protocol):
    @property
    def calls(self) -> int:
        """Return the number of started calls."""

    @property
    def thinks(self) -> bool | None:
        """Return whether the next text is reasoning; None for a format without reasoning."""

    def push(self, text: str) -> Sequence[OutputPiece]: ...

    def finish(self) -> Sequence[OutputPiece]:
        """Return the withheld pieces at the end of the answer."""


def new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def beginning_of(tag: str, text: str) -> int:
    """Return the number of characters at the end of `text` that may begin `tag`; 0 if none."""
    longest = min(len(tag) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(tag[:length])), 0)
