"""Body of POST /v1/responses: items and options. The rules for bodies are in router/http/messages.py."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from baton.router.http.edge.problem import Renamed
from baton.router.http.messages import (
    MAX_TOOLS,
    OWN_TOOLS,
    Body,
    Count,
    JsonObjectFormat,
    MessagePart,
    NamedSchemaFormat,
    OpenAIFields,
    Parameters,
    ResponseStreamOptions,
    TextFormat,
    Unserved,
    harmless,
)

_EARLIER = "part of an earlier answer"
_CONVERSATION = "use previous_response_id to continue a conversation"
Status = Literal["in_progress", "completed", "incomplete"]


# Items of the input, including items of earlier responses


class ContentPart(MessagePart):
    type: Literal["input_text", "output_text", "text"]
    text: str

    annotations: list[Any] | None = harmless("citations of an earlier answer, which no template shows")
    logprobs: list[Any] | None = harmless(_EARLIER)


class EarlierItem(Body):
    """Fields that an item has if it comes from an earlier response."""

    id: str | None = None

    status: Status | None = harmless(_EARLIER)


class InputMessage(EarlierItem):
    type: Literal["message"] = "message"
    role: str
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)]

    phase: Literal["commentary", "final_answer"] | None = harmless("part of an earlier answer, which no template shows")


class CallItem(EarlierItem):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    caller: Any = harmless("caller of an earlier call: the model")
    namespace: Annotated[Any, Unserved(OWN_TOOLS)] = None
    async_: Annotated[Any, Unserved(OWN_TOOLS, (False,))] = Field(None, alias="async")


class CallOutputItem(EarlierItem):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[ContentPart], Field(fail_fast=True)]

    caller: Any = harmless("caller of an earlier call: the model")


class SummaryText(Body):
    type: Literal["summary_text"]
    text: str


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(EarlierItem):
    """Reasoning of an earlier answer. The model gets it if its chat template reads reasoning."""

    type: Literal["reasoning"]
    summary: list[SummaryText] = Field(default_factory=list)
    content: list[ReasoningText] | None = Field(None, description="takes precedence over the summary")

    encrypted_content: Annotated[Any, Unserved("reasoning is sent and received in content", ("",))] = None


def _kind(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type="unknown_kind",
        custom_error_message="must be an item whose type is message, function_call, function_call_output or reasoning",
    ),
]


# Tools and the choice of a tool


class FlatTool(Body):
    """Function tool of the Responses API, which has no inner object `function`."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = Field(None, description="calls forced by tool_choice follow the schema for both values")

    defer_loading: Annotated[Any, Unserved(OWN_TOOLS, (False,))] = None
    allowed_callers: Annotated[Any, Unserved(OWN_TOOLS, (["direct"],))] = None
    output_schema: Annotated[Any, Unserved("describe the output in the description")] = None


class FlatNamedTool(Body):
    type: Literal["function"]
    name: str


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatNamedTool], Field(fail_fast=True, max_length=MAX_TOOLS)]


# The body and its options


class TextOptions(Body):
    format: Annotated[TextFormat | JsonObjectFormat | NamedSchemaFormat, Field(discriminator="type")] | None = None

    verbosity: Annotated[Any, Unserved("ask for it in instructions", ("medium",))] = None


class Reasoning(Body):
    effort: str | None = Field(
        None,
        description="reasoning_effort of the model's template; if that has enable_thinking only, `none` is false",
    )
    summary: Literal["auto", "detailed"] | None = Field(
        None, description="the complete reasoning is sent as summary, not shortened; default: sent as content"
    )

    generate_summary: Annotated[Any, Unserved("use summary")] = None
    mode: Annotated[Any, Unserved("there is one mode", ("standard",))] = None
    context: Annotated[Any, Unserved("the model's template selects the earlier reasoning that it shows", ("auto",))] = (
        None
    )


Labels = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class ResponseRequest(OpenAIFields):
    """POST /v1/responses."""

    renamed: ClassVar[Renamed] = {
        **dict.fromkeys(("messages", "messages[].role", "messages[].tool_calls", "messages[].reasoning"), "input"),
        "max_tokens": "max_output_tokens",
        "tools[].function": "tools[]",
        "tool_choice.function": "tool_choice",
    }

    input: str | Annotated[list[InputItem], Field(fail_fast=True)]
    previous_response_id: str | None = Field(None, description="id of the response that the input continues")
    store: bool | None = Field(
        None, description="false: the response is not stored; default: true, within the limits of the store"
    )
    instructions: str | None = Field(None, description="system message of this response only")
    max_output_tokens: Count | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    thinking_budget: Count | None = Field(None, description="maximum number of reasoning tokens")
    tools: Annotated[list[FlatTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatNamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call")
    metadata: Labels | None = Field(None, description="labels, which the response repeats")
    include: list[Literal["reasoning.encrypted_content"]] | None = harmless("reasoning is sent unencrypted")

    max_tool_calls: Count | None = harmless(f"limits calls of server-side tools; {OWN_TOOLS}")

    n: Annotated[Any, Unserved("a response has one choice", (1,))] = None
    conversation: Annotated[Any, Unserved(_CONVERSATION)] = None
    prompt: Annotated[Any, Unserved("prompts are not stored")] = None
    background: Annotated[Any, Unserved("answers are returned to the request only", (False,))] = None
    top_logprobs: Annotated[Any, Unserved("use /v1/chat/completions", (0,))] = None
    truncation: Annotated[Any, Unserved("prompts that are too long are rejected", ("disabled",))] = None
    context_management: Annotated[Any, Unserved("prompts that are too long are rejected", ([],))] = None
    moderation: Annotated[Any, Unserved("moderation is not implemented")] = None
