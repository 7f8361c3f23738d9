"""Treatment of fields, tools and headers of other APIs that the router does not serve: one table for all dialects.

| kind | treatment |
|---|---|
| changes tokens (`Unserved`) | rejected by name, except for values that ask for nothing |
| advises or annotates (`harmless`): caches, labels, tiers, editing of the context | accepted, and listed |
| tool that the API's provider runs itself, and its calls in the history | left out of the prompt, and listed |
| line in front of a prompt that differs for each request | left out of the prompt |

The header NOT_ACTED_UPON of an answer and `./baton why` list what was accepted or left out. Tools in free text and in
namespaces are mapped to functions (responses/tools.py).
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, Tag
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from baton.router.http.edge.problem import Renamed

NOT_ACTED_UPON = "x-baton-not-acted-upon"
"""Response header that lists what was accepted without effect."""
_LISTED_CHARACTERS = 2000  # maximum length of the header's value


class Body(BaseModel):
    """A strict body: "5" is not a number, 1 is not a boolean, and undeclared fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    renamed: ClassVar[Renamed] = {}
    """Names that the router's fields have in this body; used in errors."""


@dataclass(frozen=True)
class Unserved:
    """Type of a field that is not served: null and the `neutral` values are accepted, since they ask for nothing."""

    reason: str
    neutral: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._checked)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": [None, *self.neutral], "description": f"not served: {self.reason}"}

    def _checked(self, value: Any) -> Any:
        if value is None or any(type(value) is type(each) and value == each for each in self.neutral):
            return value
        but = f", except {json.dumps(self.neutral[0])}" if self.neutral else ""
        raise PydanticCustomError("not_served", "is not served{but}: {reason}", {"but": but, "reason": self.reason})


_HARMLESS = "accepted, does nothing: "


def harmless(reason: str) -> Any:
    """Declare a field that is accepted without effect. `reason`: why it can be ignored."""
    return Field(None, description=f"{_HARMLESS}{reason}")


TEXT_ONLY = "messages and answers are text"
OWN_TOOLS = "the server runs no tools; clients run the tools that they declare"
_TEMPLATE = "the model's own chat template is used; chat_template_kwargs sets its variables"
_CONVERSATION = "use previous_response_id to continue a conversation"
_TOO_LONG = "prompts that are too long are rejected"
_TENANT = "here an API key names the tenant"


# Fields of bodies, by API. Fields that are served are declared in the bodies themselves.


class OpenAIUnserved(Body):
    """Fields of all requests of OpenAI's API."""

    user: str | None = harmless(f"names an end user to OpenAI; {_TENANT}")
    safety_identifier: str | None = harmless("OpenAI's newer name of user")
    metadata: dict[str, Any] | None = harmless("labels of a stored answer, and chats are not stored")
    client_metadata: dict[str, Any] | None = harmless("labels of the client, such as ids of its turns")
    store: bool | None = harmless("chats are not stored; fields that read a stored answer are rejected")
    service_tier: str | None = harmless("there is one tier; priority orders requests")
    prompt_cache_options: dict[str, Any] | None = harmless("the prefix cache needs no options")


class ChatUnserved(Body):
    """Fields of POST /v1/chat/completions."""

    prediction: dict[str, Any] | None = harmless("a hint for speed, which changes no answer")
    verbosity: str | None = harmless("a hint, which no template reads; ask for it in a message")

    functions: Annotated[Any, Unserved("send functions in tools", ([],))] = None
    function_call: Annotated[Any, Unserved("use tool_choice")] = None
    modalities: Annotated[Any, Unserved(TEXT_ONLY, (["text"],))] = None
    audio: Annotated[Any, Unserved(TEXT_ONLY)] = None
    web_search_options: Annotated[Any, Unserved("web search is not implemented")] = None
    moderation: Annotated[Any, Unserved("moderation is not implemented")] = None
    echo: Annotated[Any, Unserved("use /v1/completions", (False,))] = None
    add_special_tokens: Annotated[Any, Unserved("the chat template adds special tokens", (False,))] = None
    chat_template: Annotated[Any, Unserved(_TEMPLATE)] = None
    documents: Annotated[Any, Unserved("send documents in a message", ([],))] = None
    mm_processor_kwargs: Annotated[Any, Unserved(TEXT_ONLY, ({},))] = None
    media_io_kwargs: Annotated[Any, Unserved(TEXT_ONLY, ({},))] = None


Included = Literal[
    "reasoning.encrypted_content",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
]


class ResponsesUnserved(Body):
    """Fields of POST /v1/responses."""

    include: list[Included] | None = harmless("reasoning is sent unencrypted, and the server calls no tools")
    max_tool_calls: Annotated[int, Field(ge=0)] | None = harmless(f"limits calls of server-side tools; {OWN_TOOLS}")
    context_management: Any = harmless(f"the client shortens its conversation; {_TOO_LONG}")

    n: Annotated[Any, Unserved("a response has one choice", (1,))] = None
    conversation: Annotated[Any, Unserved(_CONVERSATION)] = None
    prompt: Annotated[Any, Unserved("prompts are not stored")] = None
    background: Annotated[Any, Unserved("answers are returned to the request only", (False,))] = None
    top_logprobs: Annotated[Any, Unserved("use /v1/chat/completions", (0,))] = None
    truncation: Annotated[Any, Unserved(_TOO_LONG, ("disabled",))] = None
    moderation: Annotated[Any, Unserved("moderation is not implemented")] = None


class MessagesUnserved(Body):
    """Fields of POST /v1/messages and /v1/messages/count_tokens."""

    context_management: Any = harmless(f"the client shortens its conversation; {_TOO_LONG}")
    mcp_servers: Any = harmless(OWN_TOOLS)
    service_tier: str | None = harmless("there is one tier; priority orders requests")
    inference_geo: str | None = harmless("there is one location")
    user_profile_id: str | None = harmless(f"names a user to Anthropic; {_TENANT}")
    workspace_id: str | None = harmless(f"names a workspace to Anthropic; {_TENANT}")
    diagnostics: Any = harmless("asks why a prompt was not cached: `./baton why` tells it")
    speed: str | None = harmless("there is one speed")
    fallbacks: Any = harmless("there is no other model to fall back to")
    betas: list[str] | None = harmless("names features of Anthropic's API")
    anthropic_beta: list[str] | None = harmless("names features of Anthropic's API")
    anthropic_version: str | None = harmless("names a version of Anthropic's API")

    container: Annotated[Any, Unserved(OWN_TOOLS)] = None


class ToolUnserved(Body):
    """Fields of a function in the APIs of Anthropic and of Responses."""

    eager_input_streaming: bool | None = harmless("arguments are always streamed")
    allowed_callers: list[str] | None = harmless("the model is the only caller")
    input_examples: Annotated[Any, Unserved("describe them in the description", ([],))] = None
    output_schema: Annotated[Any, Unserved("describe the output in the description")] = None


# Tools and contents of messages


OWN = "own"
OWN_TAG = repr(OWN)
"""Tag of the provider's own tools and blocks, as errors write it."""


# Objects of any form, since the router does not read them.
ProviderTool = Annotated[dict[str, Any], Tag(OWN), Field(examples=[{"type": "web_search_20250305"}])]
"""Tool that the API's provider runs: any type other than the declared ones."""
ProviderBlock = Annotated[dict[str, Any], Tag(OWN), Field(examples=[{"type": "redacted_thinking"}])]
"""Block of Anthropic's messages that is left out of the prompt: see PROVIDER_BLOCKS."""
ProviderItem = Annotated[dict[str, Any], Tag(OWN), Field(examples=[{"type": "web_search_call"}])]
"""Item of OpenAI's responses that is left out of the prompt: see PROVIDER_ITEMS."""


def _is_typed(value: Any, declared: Mapping[str | None, str]) -> str | None:
    """Return the tag of an object by its type: from `declared`, or "own" for any other type."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if not isinstance(value, dict | BaseModel) or not isinstance(kind, str | None):
        return None
    return declared.get(kind, OWN if kind is not None else None)


def tool_kinds(declared: Mapping[str | None, str]) -> Discriminator:
    """Return the discriminator of tools. `declared`: tags of the tools that reach the model, by their type."""
    return Discriminator(
        lambda value: _is_typed(value, declared),
        custom_error_type="unknown_kind",
        custom_error_message="must be a tool with a text as its type",
    )


PROVIDER_BLOCKS = frozenset(
    (
        *("redacted_thinking", "server_tool_use", "mcp_tool_use", "mcp_tool_result", "container_upload"),
        *("web_search_tool_result", "web_fetch_tool_result", "tool_search_tool_result", "code_execution_tool_result"),
        *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "advisor_tool_result"),
    )
)
"""Blocks of Anthropic's messages from its own tools, or readable for Anthropic only."""
PROVIDER_ITEMS = frozenset(
    (
        *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "computer_call"),
        *("computer_call_output", "mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
        *("tool_search_call", "tool_search_output"),
    )
)
"""Items of OpenAI's responses from its own tools."""
UNREAD_CONTENT: Mapping[str, str] = {
    **dict.fromkeys(("image", "image_url", "input_image", "local_image", "computer_screenshot"), "images"),
    **dict.fromkeys(("input_audio", "audio", "audio_url"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "videos"),
    **dict.fromkeys(("document", "file", "input_file"), "files"),
}
"""Content that a model of texts cannot read, by type of a part or block. It is rejected under this name."""


# Headers and prompts

ADVISING_HEADERS = ("anthropic-beta", "openai-beta")
_FRONT_LINES = (re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*"),)
"""Lines that clients put in front of a system prompt, with other values for each request. Claude Code's line has a
hash of the request; with it, no prefix of the prompt would be cached."""


def without_front_lines(text: str) -> str:
    """Return a system prompt without the lines that differ for each request."""
    for line in _FRONT_LINES:
        text = line.sub("", text)
    return text


# The list of what was not acted upon


@cache
def _harmless_fields(message_type: type[Body]) -> frozenset[str]:
    fields = message_type.model_fields.items()
    return frozenset(name for name, field in fields if (field.description or "").startswith(_HARMLESS))


def accepted_without_effect(message: Body, path: str = "") -> Iterator[str]:
    """Yield the harmless fields that a body or an object in it sets. Lists, such as messages, are not searched."""
    ignored = _harmless_fields(type(message))
    for name in sorted(message.model_fields_set):
        value = getattr(message, name)
        if name in ignored and value is not None:
            yield path + (type(message).model_fields[name].alias or name)
        elif isinstance(value, Body):
            yield from accepted_without_effect(value, f"{path}{name}.")


def header_value(listed: Iterable[str]) -> str:
    """Return the header's value for a list: printable ASCII of bounded length."""
    text = ", ".join(dict.fromkeys(listed))
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text[:_LISTED_CHARACTERS])
