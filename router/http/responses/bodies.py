"""Body of POST /v1/responses: items and options; router/http/messages.py has the rules of bodies."""

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

_EARLIER = "of an earlier answer"
_CONVERSATION = "previous_response_id continues a conversation"
Status = Literal["in_progress", "completed", "incomplete"]


# Items, including those of earlier responses


class ContentPart(MessagePart):
    type: Literal["input_text", "output_text", "text"]
    text: str

    annotations: list[Any] | None = harmless("citations of an earlier answer, which no template shows")
    logprobs: list[Any] | None = harmless(_EARLIER)


class InputMessage(Body):
    type: Literal["message"] = "message"
    role: str
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)]
    id: str | None = None

    status: Status | None = harmless(_EARLIER)
    phase: Literal["commentary", "final_answer"] | None = harmless(f"{_EARLIER}; no template shows it")


class CallItem(Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None

    status: Status | None = harmless(_EARLIER)
    caller: Any = harmless("of an earlier call, that it was the model")
    namespace: Annotated[Any, Unserved(OWN_TOOLS)] = None
    async_: Annotated[Any, Unserved(OWN_TOOLS, (False,))] = Field(None, alias="async")


class CallOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[ContentPart], Field(fail_fast=True)]
    id: str | None = None

    status: Status | None = harmless(_EARLIER)
    caller: Any = harmless("of an earlier call, that it was the model")


class SummaryText(Body):
    type: Literal["summary_text"]
    text: str


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    """Reasoning of an earlier answer, if the model's template reads it."""

    type: Literal["reasoning"]
    summary: list[SummaryText] = Field(default_factory=list)
    content: list[ReasoningText] | None = Field(None, description="goes before the summary")
    id: str | None = None

    status: Status | None = harmless(_EARLIER)
    encrypted_content: Annotated[Any, Unserved("thoughts come and go as they are, in content", ("",))] = None


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


# Tools


class FlatTool(Body):
    """A function whose fields are next to its type."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = Field(None, description="a call that tool_choice forces follows the schema either way")

    defer_loading: Annotated[Any, Unserved(OWN_TOOLS, (False,))] = None
    allowed_callers: Annotated[Any, Unserved(OWN_TOOLS, (["direct"],))] = None
    output_schema: Annotated[Any, Unserved("describe it in the description")] = None


class FlatNamedTool(Body):
    type: Literal["function"]
    name: str


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatNamedTool], Field(fail_fast=True, max_length=MAX_TOOLS)]


# The request


class TextOptions(Body):
    format: Annotated[TextFormat | JsonObjectFormat | NamedSchemaFormat, Field(discriminator="type")] | None = None

    verbosity: Annotated[Any, Unserved("ask for it in instructions", ("medium",))] = None


class Reasoning(Body):
    effort: str | None = Field(
        None, description="where the model's template reads reasoning_effort; or enable_thinking: `none` is false"
    )
    summary: Literal["auto", "detailed"] | None = Field(
        None, description="thoughts come as the summary, whole; they are not shortened. Default: as the content"
    )

    generate_summary: Annotated[Any, Unserved("summary is its name")] = None
    mode: Annotated[Any, Unserved("there is one mode", ("standard",))] = None
    context: Annotated[Any, Unserved("the model's template says which thoughts it shows", ("auto",))] = None


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
    previous_response_id: str | None = Field(None, description="the conversation that the input continues")
    store: bool | None = Field(None, description="false: nothing is kept of it. Default: true, as far as there is room")
    instructions: str | None = Field(None, description="of this response alone: the next one has its own")
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
    include: list[Literal["reasoning.encrypted_content"]] | None = harmless("thoughts come as they are")

    max_tool_calls: Count | None = harmless(f"bounds the calls of a server's tools; {OWN_TOOLS}")

    n: Annotated[Any, Unserved("a response is one answer", (1,))] = None
    conversation: Annotated[Any, Unserved(_CONVERSATION)] = None
    prompt: Annotated[Any, Unserved("there are no stored prompts")] = None
    background: Annotated[Any, Unserved("an answer goes to the request that asked for it", (False,))] = None
    top_logprobs: Annotated[Any, Unserved("/v1/chat/completions has it", (0,))] = None
    truncation: Annotated[Any, Unserved("a prompt that is too long is refused", ("disabled",))] = None
    context_management: Annotated[Any, Unserved("a prompt that is too long is refused", ([],))] = None
    moderation: Annotated[Any, Unserved("nothing is moderated")] = None
