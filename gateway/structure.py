"""The form that the answer is to have, from whichever field of a message defines it. Pure."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

from baton.gateway.http.problem import refused
from baton.gateway.messages.chat import ChatRequest
from baton.gateway.messages.completions import CompletionRequest
from baton.gateway.messages.responses import ResponseRequest
from baton.gateway.messages.structure import (
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchemaFormat,
    StructuredOutputs,
    StructureFields,
    TextFormat,
)
from baton.generation.structured.output import StructuredKind, StructuredOutput


class AskedForm(NamedTuple):
    field: str  # of the message
    form: StructuredOutput


def structure_of(message: StructureFields) -> StructuredOutput | None:
    """None where any text will do. Raises: Problem for more than one form."""
    asked = list(asked_forms(message))
    if len(asked) > 1:
        raise refused(asked[1].field, f"one form at most; {asked[0].field} asks for another")
    return asked[0].form if asked else None


def asked_forms(message: BaseModel) -> Iterator[AskedForm]:
    """All that the message asks for, OpenAI's fields first. Raises: Problem."""
    match message:
        case ChatRequest() | CompletionRequest():
            yield from _of_format("response_format", message.response_format)
        case ResponseRequest() if message.text is not None:
            yield from _of_format("text.format", message.text.format)
    if isinstance(message, StructureFields):
        given = message.structured_outputs or StructuredOutputs(json=None)
        for kind, name, newer, older in (
            (StructuredKind.JSON_SCHEMA, "json", given.json_, message.guided_json),
            (StructuredKind.REGEX, "regex", given.regex, message.guided_regex),
            (StructuredKind.CHOICE, "choice", given.choice, message.guided_choice),
            (StructuredKind.GRAMMAR, "grammar", given.grammar, message.guided_grammar),
            (StructuredKind.JSON_OBJECT, "json_object", given.json_object, message.guided_json_object),
        ):
            for field, value in ((f"structured_outputs.{name}", newer), (f"guided_{name}", older)):
                if value is not None and value is not False:
                    yield AskedForm(field, _form(kind, value))


def json_schema(schema: dict[str, Any] | str) -> StructuredOutput:
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return StructuredOutput(StructuredKind.JSON_SCHEMA, text)


def _of_format(
    field: str, given: TextFormat | JsonObjectFormat | JsonSchemaFormat | NamedSchemaFormat | None
) -> Iterator[AskedForm]:
    match given:
        case JsonObjectFormat():
            yield AskedForm(field, StructuredOutput(StructuredKind.JSON_OBJECT))
        case NamedSchemaFormat():
            yield AskedForm(field, json_schema(given.schema_))
        case JsonSchemaFormat(json_schema=asked):
            if asked.schema_ is None:
                raise refused(f"{field}.json_schema.schema", "is missing")
            yield AskedForm(field, json_schema(asked.schema_))


def _form(kind: StructuredKind, value: Any) -> StructuredOutput:
    match kind:
        case StructuredKind.JSON_SCHEMA:
            return json_schema(value)
        case StructuredKind.CHOICE:
            return StructuredOutput.choice(value)
        case StructuredKind.JSON_OBJECT:
            return StructuredOutput(kind)
    return StructuredOutput(kind, value)
