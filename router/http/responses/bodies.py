"""Body of POST /v1/responses: items and options. The rules for bodies are in router/http/messages.py."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from baton.router.http.dialects import (
    OWN,
    OWN_TOOLS,
    PROVIDER_ITEMS,
    Body,
    ProviderItem,
    ProviderTool,
    ResponsesUnserved,
    ToolUnserved,
    Unserved,
    harmless,
    tool_kinds,
)
from baton.router.http.edge.problem import Renamed
from baton.router.http.messages import (
    MAX_TOOLS,
    Count,
    JsonObjectFormat,
    MessagePart,
    NamedSchemaFormat,
    OpenAIFields,
    Parameters,
    ResponseStreamOptions,
    TextFormat,
)

_EARLIER = "part of an earlier answer"
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
    metadata: Any = harmless("labels of the client")
    internal_chat_message_metadata_passthrough: Any = harmless("labels of Codex")


class InputMessage(EarlierItem):
    type: Literal["message"] = "message"
    role: str
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)]

    phase: Literal["commentary", "final_answer"] | None = harmless("part of an earlier answer, which no template shows")
    end_turn: bool | None = harmless(_EARLIER)


class CallItem(EarlierItem):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    namespace: str | None = Field(None, description="namespace of the function, if it has one")

    caller: Any = harmless("caller of an earlier call: the model")
    async_: Annotated[Any, Unserved(OWN_TOOLS, (False,))] = Field(None, alias="async")


class CallOutputItem(EarlierItem):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[ContentPart], Field(fail_fast=True)]

    caller: Any = harmless("caller of an earlier call: the model")


class CustomCallItem(EarlierItem):
    """Call of a tool with free text as input."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = None

    caller: Any = harmless("caller of an earlier call: the model")


class CustomOutputItem(EarlierItem):
    type: Literal["custom_tool_call_output"]
    call_id: str
    name: str | None = None
    output: str | Annotated[list[ContentPart], Field(fail_fast=True)]

    caller: Any = harmless("caller of an earlier call: the model")


class ShellAction(Body):
    type: Literal["exec"] = "exec"
    command: list[str]
    working_directory: str | None = None
    timeout_ms: int | None = None
    env: dict[str, str] | None = None
    user: str | None = None


class ShellCallItem(EarlierItem):
    """Call of the client's shell."""

    type: Literal["local_shell_call"]
    call_id: str
    action: ShellAction


class ShellOutputItem(EarlierItem):
    type: Literal["local_shell_call_output"]
    call_id: str | None = Field(None, description="default: id")
    output: str


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

    encrypted_content: str | None = harmless("reasoning is sent and received in content")


class CompactionItem(EarlierItem):
    """Summary that POST /v1/responses/compact returned."""

    type: Literal["compaction", "compaction_summary"]
    encrypted_content: str


def _kind(item: Any) -> Any:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    if kind == "compaction_summary":
        return "compaction"
    return OWN if isinstance(kind, str) and kind in PROVIDER_ITEMS else kind


GivenItem = (
    InputMessage
    | CallItem
    | CallOutputItem
    | CustomCallItem
    | CustomOutputItem
    | ShellCallItem
    | ShellOutputItem
    | ReasoningItem
    | CompactionItem
)
InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CustomOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ShellCallItem, Tag("local_shell_call")]
    | Annotated[ShellOutputItem, Tag("local_shell_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CompactionItem, Tag("compaction")]
    | ProviderItem,
    Discriminator(
        _kind,
        custom_error_type="unknown_kind",
        custom_error_message="must be an item whose type is message, function_call, function_call_output, "
        "custom_tool_call, custom_tool_call_output, local_shell_call, local_shell_call_output, reasoning or compaction",
    ),
]


# Tools and the choice of a tool


class FlatTool(ToolUnserved):
    """Function tool of the Responses API, which has no inner object `function`."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = Field(None, description="calls forced by tool_choice follow the schema for both values")

    defer_loading: bool | None = harmless("all tools are described at the beginning")


class ToolGrammar(Body):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


class FreeTool(ToolUnserved):
    """Tool with free text as input. The model gets it as a function with one text, whose grammar is described. The
    grammar is enforced if tool_choice names the tool.
    """

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: Annotated[TextFormat | ToolGrammar, Field(discriminator="type")] | None = None

    defer_loading: bool | None = harmless("all tools are described at the beginning")


class ShellTool(Body):
    """The client's shell. The model gets it as a function."""

    type: Literal["local_shell"]


class Namespace(Body):
    """Named group of tools. The model gets each as NAMESPACE__NAME."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[Annotated[FlatTool | FreeTool, Field(discriminator="type")]]


ResponseTool = Annotated[
    Annotated[FlatTool, Tag("function")]
    | Annotated[FreeTool, Tag("custom")]
    | Annotated[ShellTool, Tag("local_shell")]
    | Annotated[Namespace, Tag("namespace")]
    | ProviderTool,
    tool_kinds({name: name for name in ("function", "custom", "local_shell", "namespace")}),
]


class FlatNamedTool(Body):
    type: Literal["function", "custom"]
    name: str


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatNamedTool], Field(fail_fast=True, max_length=MAX_TOOLS)]


# The body and its options


class TextOptions(Body):
    format: Annotated[TextFormat | JsonObjectFormat | NamedSchemaFormat, Field(discriminator="type")] | None = None

    verbosity: str | None = harmless("a hint, which no template reads; ask for it in instructions")


class Reasoning(Body):
    effort: str | None = Field(
        None,
        description="reasoning_effort of the model's template, if it reads that; with enable_thinking only, `none` is "
        "false",
    )
    summary: Literal["auto", "detailed"] | None = Field(
        None, description="the complete reasoning is sent as summary, not shortened; default: sent as content"
    )

    generate_summary: Annotated[Any, Unserved("use summary")] = None
    mode: Annotated[Any, Unserved("there is one mode", ("standard",))] = None
    context: str | None = harmless("the model's template selects the earlier reasoning that it shows")


Labels = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class ResponseRequest(ResponsesUnserved, OpenAIFields):
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
    max_output_tokens: Count | None = Field(
        None, description="default: the rest of the context, to which larger values are reduced"
    )
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    thinking_budget: Count | None = Field(None, description="maximum number of reasoning tokens")
    tools: Annotated[list[ResponseTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatNamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call")
    metadata: Labels | None = Field(None, description="labels, which the response repeats")


class CompactRequest(ResponseRequest):
    """POST /v1/responses/compact. Fields of the answer's form have no effect on the summary."""

    input: str | Annotated[list[InputItem], Field(fail_fast=True)] = Field(default_factory=list)
    max_output_tokens: Count | None = Field(None, description="maximum length of the summary; default: 4096")

    stream: Annotated[Any, Unserved("a compaction is returned complete", (False,))] = None
