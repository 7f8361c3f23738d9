"""Which form the answer is to have, from whichever field of a message says so. Pure."""

import json
from collections.abc import Sequence
from typing import Any

from gateway.messages.structure import (
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    StructuredOutputs,
    TextFormat,
)
from gateway.problem import refused
from structured.output import StructuredKind, StructuredOutput


def structure_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> StructuredOutput | None:
    """None where any text will do. Raises: Problem for more than one form."""
    asked = of_format(response_format)
    if structured_outputs is None:
        return asked
    named = _of_fields(structured_outputs)
    if len(named) + (asked is not None) > 1:
        raise refused("structured_outputs", "one form at most; response_format counts too")
    return named[0] if named else asked


def of_format(response_format: ResponseFormat | None) -> StructuredOutput | None:
    match response_format:
        case None | TextFormat():
            return None
        case JsonObjectFormat():
            return StructuredOutput(StructuredKind.JSON_OBJECT)
        case JsonSchemaFormat(json_schema=given):
            if given.schema_ is None:
                raise refused("response_format.json_schema.schema", "is missing")
            return json_schema(given.schema_)


def json_schema(schema: dict[str, Any] | str) -> StructuredOutput:
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return StructuredOutput(StructuredKind.JSON_SCHEMA, text)


def _of_fields(given: StructuredOutputs) -> Sequence[StructuredOutput]:
    forms = []
    if given.json_ is not None:
        forms.append(json_schema(given.json_))
    if given.regex is not None:
        forms.append(StructuredOutput(StructuredKind.REGEX, given.regex))
    if given.choice is not None:
        forms.append(StructuredOutput.choice(given.choice))
    if given.grammar is not None:
        forms.append(StructuredOutput(StructuredKind.GRAMMAR, given.grammar))
    if given.json_object:
        forms.append(StructuredOutput(StructuredKind.JSON_OBJECT))
    return forms
