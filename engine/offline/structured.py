"""The form of an answer, under vLLM's names."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from structured.output import StructuredKind, StructuredOutput, choices_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """One of these. JSON comes without white space. Raises ValueError when a request is made of it."""

    json: str | Mapping[str, Any] | None = None  # a JSON schema
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None  # Lark, as llguidance reads it
    json_object: bool | None = None

    @staticmethod
    def of(asked: StructuredOutput) -> "StructuredOutputsParams":
        """Raises: FormRefused."""
        match asked.kind:
            case StructuredKind.JSON_SCHEMA:
                return StructuredOutputsParams(json=asked.text)
            case StructuredKind.JSON_OBJECT:
                return StructuredOutputsParams(json_object=True)
            case StructuredKind.REGEX:
                return StructuredOutputsParams(regex=asked.text)
            case StructuredKind.GRAMMAR:
                return StructuredOutputsParams(grammar=asked.text)
            case StructuredKind.CHOICE:
                return StructuredOutputsParams(choice=choices_of(asked))

    def output(self) -> StructuredOutput:
        """Raises: ValueError."""
        schema = self.json if self.json is None or isinstance(self.json, str) else json.dumps(self.json)
        asked = [
            StructuredOutput(kind, text)
            for kind, text in (
                (StructuredKind.JSON_SCHEMA, schema),
                (StructuredKind.REGEX, self.regex),
                (StructuredKind.GRAMMAR, self.grammar),
                (StructuredKind.JSON_OBJECT, "" if self.json_object else None),
            )
            if text is not None
        ]
        if self.choice is not None:
            asked.append(StructuredOutput.choice(self.choice))
        if len(asked) != 1:
            raise ValueError("structured_outputs: give one of json, regex, choice, grammar and json_object")
        return asked[0]
