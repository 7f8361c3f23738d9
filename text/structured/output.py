"""A form that an answer is to have, as a request states it. Pure: whether a library can follow it is not known here."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from baton.text.structured.json_text import JsonRefused, read_json
from baton.text.structured.schema import SchemaRefused, enforceable_schema

MAX_BYTES = 1 << 16  # of a pattern, a grammar, all choices together, or a schema without its annotations
MAX_SCHEMA_BYTES = 1 << 20  # with them
MAX_CHOICES = 1000


class StructuredKind(Enum):
    """The values are the names of the public fields."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"
    THOUGHTS = "thinking_budget"  # text/structured/thoughts.py


class FormRefused(ValueError):
    """No answer can be held to this form; the message is the reason."""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """`text` by kind: a JSON schema as JSON; empty for any JSON object; a regular expression, which the whole answer
    matches; a grammar in llguidance's Lark, whose rule `start` the answer is; a JSON list of texts, one of which is it.

    JSON comes without white space between its tokens.
    """

    kind: StructuredKind
    text: str = ""

    @staticmethod
    def choice(texts: Sequence[str]) -> "StructuredOutput":
        return StructuredOutput(StructuredKind.CHOICE, json.dumps(list(texts), ensure_ascii=False))

    @property
    def field(self) -> str:
        """Of the public schema."""
        return f"sampling.{self.kind.value}"


def json_schema(schema: Mapping[str, Any] | str) -> StructuredOutput:
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return StructuredOutput(StructuredKind.JSON_SCHEMA, text)


def enforceable_form(output: StructuredOutput) -> StructuredOutput:
    """The form as a grammar holds it, from the form as a client sent it. Raises: FormRefused."""
    if output.kind is StructuredKind.JSON_SCHEMA:
        if len(output.text) > MAX_SCHEMA_BYTES:
            raise FormRefused(f"at most {MAX_SCHEMA_BYTES} bytes")
        try:
            output = json_schema(enforceable_schema(_read_schema(output.text)))
        except SchemaRefused as refusal:
            raise FormRefused(str(refusal)) from refusal
    check_form(output)
    return output


def check_form(output: StructuredOutput) -> None:
    """The checks that do not need the library. Raises: FormRefused."""
    if len(output.text) > MAX_BYTES or len(output.text.encode()) > MAX_BYTES:
        raise FormRefused(f"at most {MAX_BYTES} bytes")
    match output.kind:
        case StructuredKind.JSON_SCHEMA:
            _read_schema(output.text)
        case StructuredKind.JSON_OBJECT:
            if output.text:
                raise FormRefused("any JSON object has no text; a schema is a json_schema")
        case StructuredKind.CHOICE:
            choices_of(output)
        case StructuredKind.REGEX | StructuredKind.GRAMMAR:
            if not output.text:
                raise FormRefused("is empty")


def choices_of(output: StructuredOutput) -> tuple[str, ...]:
    """Raises: FormRefused."""
    try:
        listed = read_json(output.text)
    except JsonRefused:
        listed = None
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
        raise FormRefused("is not a list of texts")
    if not listed or "" in listed:
        raise FormRefused("is empty" if not listed else f"choice {listed.index('')} is empty")
    if len(listed) > MAX_CHOICES:
        raise FormRefused(f"at most {MAX_CHOICES} choices, not {len(listed)}")
    return tuple(listed)


def _read_schema(text: str) -> dict[str, Any]:
    """Raises: FormRefused."""
    try:
        schema = read_json(text)
    except JsonRefused as refusal:
        raise FormRefused(str(refusal)) from refusal
    if not isinstance(schema, dict):
        raise FormRefused("is not a JSON object: a schema is one")
    if "x-guidance" in schema:
        raise FormRefused("x-guidance is for the server to say")
    return schema
