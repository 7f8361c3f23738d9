"""Bodies of POST /v1/messages and /v1/messages/count_tokens; router/http/messages.py has the rules of bodies."""

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

    citations: list[Any] | None = harmless("of an earlier answer, which no template shows")


class ThinkingBlock(Body):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str

    signature: str | None = harmless("proves to Anthropic that it wrote the thought")


class ToolUseBlock(Block):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]

    caller: Any = harmless("of an earlier call, that it was the model")
    toolset_name: str | None = harmless("of an earlier call")


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    is_error: bool | None = Field(None, description="true: the model reads `Error: ` before the content")

    toolset_name: str | None = harmless("of an earlier call")


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
    strict: bool | None = Field(None, description="a call that tool_choice forces follows the schema either way")

    eager_input_streaming: bool | None = harmless("arguments are streamed as they are written")
    input_examples: Annotated[Any, Unserved("put them into the description", ([],))] = None
    defer_loading: Annotated[Any, Unserved(OWN_TOOLS, (False,))] = None
    allowed_callers: Annotated[Any, Unserved(OWN_TOOLS, (["direct"],))] = None


class AnyTool(Body):
    """Tool choice that names no tool."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = Field(None, description="true: one call at most")


class NamedTool(Body):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = Field(None, description="it is one call either way")


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]

    budget_tokens: Count | None = Field(None, description="tokens of thoughts, at most")
    display: Annotated[Any, Unserved("thoughts come as they are", ("summarized",))] = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: str | None = Field(None, description="where the model's template reads reasoning_effort")
    format: OutputFormat | None = None


class Metadata(Body):
    user_id: str | None = Field(None, description="one that ends with `_session_` and an id names the session by it")


class PromptFields(RequestFields):
    """Fields that form the prompt."""

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
    tool_choice: Annotated[AnyTool | NamedTool, Field(discriminator="type")] | None = None
    thinking: Thinking | None = Field(None, description="default: none, where the model's template leaves the choice")
    output_config: OutputConfig | None = None

    cache_control: CacheControl | None = None
    mcp_servers: Annotated[Any, Unserved(OWN_TOOLS, ([],))] = None
    context_management: Annotated[Any, Unserved("a prompt that is too long is refused")] = None


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
    inference_geo: str | None = harmless("there is one place")
    user_profile_id: str | None = harmless("names a user to Anthropic; here an API key names the tenant")
    workspace_id: str | None = harmless("the same of a workspace")
    diagnostics: Annotated[Any, Unserved("`./baton why` and the traces say where time went")] = None
    container: Annotated[Any, Unserved(OWN_TOOLS)] = None
    speed: Annotated[Any, Unserved("there is one speed", ("standard",))] = None


class CountTokensRequest(PromptFields):
    """POST /v1/messages/count_tokens."""


ANTHROPIC_MESSAGES = (MessagesRequest, CountTokensRequest)
