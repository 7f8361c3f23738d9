"""POST /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.messages.base import Body, Count
from gateway.messages.sampling import RequestFields, SamplingFields, StreamOptions
from gateway.messages.structure import ResponseFormat


class TextPart(Body):
    type: Literal["text"]
    text: str


class CalledFunction(Body):
    name: str
    arguments: str


class ToolCallMessage(Body):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Body):
    role: str
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallMessage], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None


class FunctionTool(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ChatRequest(RequestFields, SamplingFields):
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)]
    max_tokens: Count | None = Field(None, description="per choice; default: what the context leaves room for")
    max_completion_tokens: Count | None = Field(None, description="the newer name of max_tokens")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = Field(None, description="needs logprobs; at most 20")
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None
