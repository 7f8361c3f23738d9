"""A form that the answer is asked to have, in OpenAI's and in vLLM's fields."""

from typing import Annotated, Any, Literal

from pydantic import Field

from baton.gateway.messages.base import Body, Texts
from baton.gateway.messages.harmless import HarmlessGuidedFields, HarmlessStructureFields
from baton.gateway.messages.unserved import UnservedStructure


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class JsonSchema(Body):
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="answers follow the schema either way")


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class NamedSchemaFormat(Body):
    """Of a response."""

    type: Literal["json_schema"]
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="answers follow the schema either way")


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(HarmlessStructureFields, UnservedStructure):
    """vLLM's; one of the fields."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StructureFields(HarmlessGuidedFields):
    """vLLM's, under the newer name and under the older ones. One form at most."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = Field(None, description="the older name of structured_outputs.json")
    guided_regex: str | None = Field(None, description="the older name of structured_outputs.regex")
    guided_choice: Texts | None = Field(None, description="the older name of structured_outputs.choice")
    guided_grammar: str | None = Field(None, description="the older name of structured_outputs.grammar")
    guided_json_object: bool | None = Field(None, description="the older name of structured_outputs.json_object")
