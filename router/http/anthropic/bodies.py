"""Bodies of POST /v1/messages and /v1/messages/count_tokens. The rules for bodies are in router/http/messages.py."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from baton.router.http.edge.problem import Renamed
from baton.router.http.messages import (
    MAX_TOOLS,
    OWN_TOOLS,
    Body,
    CacheControl,
    Count,
    Parameters,
    RequestFields,
    Texts,
    Unserved,
    harmless,
)
from baton.router.public.chat import BUDGET, EFFORT, THINKING


class Block(Body):
    cache_control: CacheControl | None = None


class TextBlock(Block):
    type: Literal["text"]
    text: str

    citations: list[Any] | None = harmless("citations of an earlier answer, which no template shows")


class ThinkingBlock(Body):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str

    signature: str | None = harmless("Anthropic's signature of its own reasoning")


class ToolUseBlock(Block):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]

    caller: Any = harmless("caller of an earlier call: the model")
    toolset_name: str | None = harmless("toolset of an earlier call")


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    is_error: bool | None = Field(None, description="true: the model reads `Error: ` before the content")

    toolset_name: str | None = harmless("toolset of an earlier call")


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class UserTurn(Body):
    role: Literal["user"]
    content: str | Annotated[list[UserBlock], Field(fail_fast=True)]


class AssistantTurn(Body):
    role: Literal["assistant"]
    content: str | Annotated[list[AssistantBlock], Field(fail_fast=True)]


Turn = Annotated[UserTurn | AssistantTurn, Field(discriminator="role")]


class CustomTool(Body):
    name: str
    description: str | None = None
    input_schema: Parameters
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None
    strict: bool | None = Field(None, description="calls forced by tool_choice follow the schema for both values")

    eager_input_streaming: bool | None = harmless("arguments are always streamed")
    input_examples: Annotated[Any, Unserved("describe them in the description", ([],))] = None
    defer_loading: Annotated[Any, Unserved(OWN_TOOLS, (False,))] = None
    allowed_callers: Annotated[Any, Unserved(OWN_TOOLS, (["direct"],))] = None


class AnyTool(Body):
    """Tool choice that names no tool."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = Field(None, description="true: at most one call")


class ForcedTool(Body):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = Field(None, description="no effect: a named tool is called once")


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]

    budget_tokens: Count | None = Field(None, description="maximum number of reasoning tokens")
    display: Annotated[Any, Unserved("reasoning is sent unchanged", ("summarized",))] = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: str | None = Field(None, description="reasoning_effort of the model's template")
    format: OutputFormat | None = None


class Metadata(Body):
    user_id: str | None = Field(None, description="a user id that ends with `_session_` and an id sets session_id")


class PromptFields(RequestFields):
    """Fields from which the prompt is rendered."""

    renamed: ClassVar[Renamed] = {
        "stop": "stop_sequences",
        "json_schema": "output_config.format",
        **dict.fromkeys(("messages[].role", "messages[].tool_calls", "messages[].reasoning"), "messages"),
        "tools[].function.parameters": "tools[].input_schema",
        "tools[].function": "tools[]",
        "tool_choice.function": "tool_choice",
        f"template_options.{THINKING}": "thinking",
        f"template_options.{EFFORT}": "output_config.effort",
        BUDGET: "thinking.budget_tokens",
    }

    messages: Annotated[list[Turn], Field(fail_fast=True)]
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    tools: Annotated[list[CustomTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[AnyTool | ForcedTool, Field(discriminator="type")] | None = None
    thinking: Thinking | None = Field(None, description="default: disabled, if the model's template has the option")
    output_config: OutputConfig | None = None

    cache_control: CacheControl | None = None
    mcp_servers: Annotated[Any, Unserved(OWN_TOOLS, ([],))] = None
    context_management: Annotated[Any, Unserved("prompts that are too long are rejected")] = None


class MessagesRequest(PromptFields):
    """POST /v1/messages."""

    max_tokens: Count
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    stop_sequences: Texts | None = None
    stream: bool | None = None
    metadata: Metadata | None = None

    service_tier: Literal["auto", "standard_only"] | None = harmless("there is one tier; priority orders requests")
    inference_geo: str | None = harmless("there is one location")
    user_profile_id: str | None = harmless("names a user to Anthropic; here an API key names the tenant")
    workspace_id: str | None = harmless("names a workspace to Anthropic; here an API key names the tenant")
    diagnostics: Annotated[Any, Unserved("use `./baton why` or traces")] = None
    container: Annotated[Any, Unserved(OWN_TOOLS)] = None
    speed: Annotated[Any, Unserved("there is one speed", ("standard",))] = None


class CountTokensRequest(PromptFields):
    """POST /v1/messages/count_tokens."""


ANTHROPIC_MESSAGES = (MessagesRequest, CountTokensRequest)
