"""POST /v1/responses: text."""

from typing import Annotated, Literal

from pydantic import Field

from baton.gateway.messages.base import Count
from baton.gateway.messages.harmless import (
    HarmlessFields,
    HarmlessItemFields,
    HarmlessOutputFields,
    HarmlessPartFields,
    HarmlessResponseFields,
)
from baton.gateway.messages.sampling import RequestFields, SamplingFields
from baton.gateway.messages.structure import JsonObjectFormat, NamedSchemaFormat, TextFormat
from baton.gateway.messages.unserved import UnservedReasoning, UnservedResponse, UnservedStream, UnservedTextOptions


class ContentPart(HarmlessPartFields, HarmlessOutputFields):
    type: Literal["input_text", "output_text", "text"]
    text: str


class InputMessage(HarmlessItemFields):
    type: Literal["message"] = "message"
    role: str
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)]


class TextOptions(UnservedTextOptions):
    format: Annotated[TextFormat | JsonObjectFormat | NamedSchemaFormat, Field(discriminator="type")] | None = None


class Reasoning(UnservedReasoning):
    effort: str | None = Field(None, description="where the model's template reads reasoning_effort")


class ResponseRequest(RequestFields, SamplingFields, HarmlessFields, HarmlessResponseFields, UnservedResponse):
    input: str | Annotated[list[InputMessage], Field(fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    stream_options: UnservedStream | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
