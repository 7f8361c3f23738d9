"""POST /v1/responses: text."""

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.messages.base import Body, Count
from gateway.messages.sampling import RequestFields, SamplingFields
from gateway.messages.structure import JsonObjectFormat, TextFormat


class ContentPart(Body):
    type: Literal["input_text", "output_text", "text"]
    text: str


class InputMessage(Body):
    type: Literal["message"] = "message"
    role: str
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)]


class NamedSchemaFormat(Body):
    type: Literal["json_schema"]
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: Annotated[TextFormat | JsonObjectFormat | NamedSchemaFormat, Field(discriminator="type")] | None = None


class ResponseRequest(RequestFields, SamplingFields):
    input: str | Annotated[list[InputMessage], Field(fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = Field(None, description="nothing is stored")
    previous_response_id: str | None = Field(None, description="not served: nothing is stored")
    conversation: Any = Field(None, description="not served: nothing is stored")
    background: bool | None = Field(None, description="only false is served")
    tools: list[Any] | None = Field(None, description="not served here; /v1/chat/completions has tools")
