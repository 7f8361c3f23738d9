"""Bodies of POST /v1/messages and /v1/messages/count_tokens. The rules for bodies are in router/http/messages.py."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from baton.router.http.anthropic.client_tools import CLIENT_TOOLS
from baton.router.http.dialects import (
    OWN,
    PROVIDER_BLOCKS,
    Body,
    MessagesUnserved,
    ProviderBlock,
    ProviderTool,
    ToolUnserved,
    harmless,
    tool_kinds,
)
from baton.router.http.edge.problem import Renamed
from baton.router.http.messages import MAX_TOOLS, CacheControl, Count, Parameters, RequestFields, Texts
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


class ToolReference(Block):
    """Result of a search for tools: the named tool, which is described where the result is."""

    type: Literal["tool_reference"]
    tool_name: str


class TextSource(Body):
    type: Literal["text"]
    media_type: str | None = None
    data: str


class DocumentBlock(Block):
    """Document as plain text."""

    type: Literal["document"]
    source: TextSource
    title: str | None = None
    context: str | None = None

    citations: Any = harmless("answers have no citations")


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: (
        str
        | Annotated[list[Annotated[TextBlock | ToolReference, Field(discriminator="type")]], Field(fail_fast=True)]
        | None
    ) = None
    is_error: bool | None = Field(None, description="true: the model reads `Error: ` before the content")

    toolset_name: str | None = harmless("toolset of an earlier call")


def _kind(block: Any) -> Any:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return OWN if isinstance(kind, str) and kind in PROVIDER_BLOCKS else kind


UserBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[DocumentBlock, Tag("document")]
    | ProviderBlock,
    Discriminator(_kind),
]
AssistantBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | ProviderBlock,
    Discriminator(_kind),
]


class UserTurn(Body):
    role: Literal["user"]
    content: str | Annotated[list[UserBlock], Field(fail_fast=True)]


class AssistantTurn(Body):
    role: Literal["assistant"]
    content: str | Annotated[list[AssistantBlock], Field(fail_fast=True)]


class SystemTurn(Body):
    """Instructions in the middle of a conversation."""

    role: Literal["system"]
    content: str | Annotated[list[TextBlock], Field(fail_fast=True)]


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


class CustomTool(ToolUnserved):
    name: str
    description: str | None = None
    input_schema: Parameters
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None
    strict: bool | None = Field(None, description="calls forced by tool_choice follow the schema for both values")
    defer_loading: bool | None = Field(None, description="true: described only where a tool_reference names it")


class ClientTool(ToolUnserved):
    """Tool of Anthropic that the client runs: a function with the arguments in CLIENT_TOOLS."""

    type: str = Field(json_schema_extra={"enum": list(CLIENT_TOOLS)})  # tool_kinds has checked it
    name: str
    cache_control: CacheControl | None = None
    strict: bool | None = Field(None, description="as in a custom tool")
    defer_loading: bool | None = Field(None, description="as in a custom tool")

    max_characters: Count | None = harmless("the client shortens the files that it shows")


AnthropicTool = Annotated[
    Annotated[CustomTool, Tag("custom")] | Annotated[ClientTool, Tag("client")] | ProviderTool,
    tool_kinds({None: "custom", "custom": "custom", **dict.fromkeys(CLIENT_TOOLS, "client")}),
]


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
    display: str | None = harmless("reasoning is sent unchanged")


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: str | None = Field(None, description="reasoning_effort of the model's template, if that reads it")
    format: OutputFormat | None = None

    task_budget: Any = harmless("a budget of several requests, of which the client reminds the model")


class Metadata(Body):
    user_id: str | None = Field(None, description="a user id that ends with `_session_` and an id sets session_id")


class PromptFields(MessagesUnserved, RequestFields):
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
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[AnyTool | ForcedTool, Field(discriminator="type")] | None = None
    thinking: Thinking | None = Field(None, description="default: disabled, if the model's template has the option")
    output_config: OutputConfig | None = None

    cache_control: CacheControl | None = None
    output_format: OutputFormat | None = Field(None, description="older name of output_config.format")


class MessagesRequest(PromptFields):
    """POST /v1/messages."""

    max_tokens: Count
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    stop_sequences: Texts | None = None
    stream: bool | None = None
    metadata: Metadata | None = None


class CountTokensRequest(PromptFields):
    """POST /v1/messages/count_tokens."""


ANTHROPIC_MESSAGES = (MessagesRequest, CountTokensRequest)
