"""POST /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import Field

from baton.gateway.messages.base import Body, Count
from baton.gateway.messages.harmless import (
    HarmlessCallFields,
    HarmlessChatFields,
    HarmlessFields,
    HarmlessFunctionFields,
    HarmlessMessageFields,
    HarmlessPartFields,
)
from baton.gateway.messages.sampling import (
    ChoiceFields,
    PromptScoreFields,
    RequestFields,
    SamplingFields,
    StreamOptions,
)
from baton.gateway.messages.structure import ResponseFormat
from baton.gateway.messages.unserved import UnservedChat, UnservedMessage


class TextPart(HarmlessPartFields):
    type: Literal["text"]
    text: str


class CalledFunction(HarmlessFunctionFields):
    name: str
    arguments: str


class ToolCallMessage(HarmlessCallFields):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(HarmlessMessageFields, UnservedMessage):
    role: str
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallMessage], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None


class FunctionTool(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="a call that tool_choice forces follows the schema either way")


class Tool(Body):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool
TemplateOptions = dict[str, bool | int | float | str | None]


class ChatRequest(
    RequestFields, SamplingFields, ChoiceFields, PromptScoreFields, HarmlessFields, HarmlessChatFields, UnservedChat
):
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)]
    max_tokens: Count | None = Field(None, description="per choice; default: what the context leaves room for")
    max_completion_tokens: Count | None = Field(None, description="the newer name of max_tokens")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = Field(None, description="needs logprobs; at most 20")
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateOptions | None = Field(None, description="names that the model's template reads")
    reasoning_effort: str | None = Field(None, description="where the model's template reads it")
