"""Structured output that a request asks for. Pure: whether the library supports it is checked elsewhere."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from baton.text.structured.json_text import JsonRefused, read_json
from baton.text.structured.schema import SchemaRefused, enforceable_schema

MAX_BYTES = 1 << 16  # maximum bytes of a pattern, a grammar, all choices, or a schema without annotations
MAX_SCHEMA_BYTES = 1 << 20  # maximum bytes of a schema with annotations
MAX_CHOICES = 1000


class StructuredKind(Enum):
    """Kind of structured output; the values are the names of the public fields."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"
    THOUGHTS = "thinking_budget"  # reasoning limit: see text/structured/thoughts.py


class FormRefused(ValueError):
    """Error: the requested structured output cannot be enforced. The message is the reason."""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """Structured output that a request asks for.

    `text` depends on the kind: a JSON schema; empty for any JSON object; a regular expression for the complete answer;
    a grammar in llguidance's Lark with the rule `start`; a JSON list of the texts to choose from. JSON answers have no
    white space between tokens.
    """

    kind: StructuredKind
    text: str = ""

    @staticmethod
    def choice(texts: Sequence[str]) -> "StructuredOutput":
        return StructuredOutput(StructuredKind.CHOICE, json.dumps(list(texts), ensure_ascii=False))

    @property
    def field(self) -> str:
        """Return the name of the request's public field."""
        return f"sampling.{self.kind.value}"


def json_schema(schema: Mapping[str, Any] | str) -> StructuredOutput:
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return StructuredOutput(StructuredKind.JSON_SCHEMA, text)


def enforceable_form(output: StructuredOutput) -> StructuredOutput:
    """Convert a client's structured output to one that a grammar enforces completely. Raises: FormRefused."""
    if output.kind is StructuredKind.JSON_SCHEMA:
        if len(output.text) > MAX_SCHEMA_BYTES:
            raise FormRefused(f"must have at most {MAX_SCHEMA_BYTES} bytes")
        try:
            output = json_schema(enforceable_schema(_read_schema(output.text)))
        except SchemaRefused as refusal:
            raise FormRefused(str(refusal)) from refusal
    check_form(output)
    return output


def check_form(output: StructuredOutput) -> None:
    """Check all of a structured output that can be checked without the library. Raises: FormRefused."""
    if len(output.text) > MAX_BYTES or len(output.text.encode()) > MAX_BYTES:
        raise FormRefused(f"must have at most {MAX_BYTES} bytes")
    match output.kind:
        case StructuredKind.JSON_SCHEMA:
            _read_schema(output.text)
        case StructuredKind.JSON_OBJECT:
            if output.text:
                raise FormRefused("json_object takes no text; use json_schema for a schema")
        case StructuredKind.CHOICE:
            choices_of(output)
        case StructuredKind.REGEX | StructuredKind.GRAMMAR:
            if not output.text:
                raise FormRefused("is empty")


def choices_of(output: StructuredOutput) -> tuple[str, ...]:
    """Return the texts from which the answer is chosen. Raises: FormRefused."""
    try:
        listed = read_json(output.text)
    except JsonRefused:
        listed = None
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
        raise FormRefused("is not a list of texts")
    if not listed or "" in listed:
        raise FormRefused("is empty" if not listed else f"choice {listed.index('')} is empty")
    if len(listed) > MAX_CHOICES:
        raise FormRefused(f"must have at most {MAX_CHOICES} choices, not {len(listed)}")
    return tuple(listed)


def _read_schema(text: str) -> dict[str, Any]:
    """Return the JSON schema in `text`. Raises: FormRefused."""
    try:
        schema = read_json(text)
    except JsonRefused as refusal:
        raise FormRefused(str(refusal)) from refusal
    if not isinstance(schema, dict):
        raise FormRefused("is not a JSON object, as a schema must be")
    if "x-guidance" in schema:
        raise FormRefused("must not have x-guidance, which only the server sets")
    return schema
