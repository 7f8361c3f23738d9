"""The one list of fields that are accepted and do nothing, with the reason for each.

None of them can change an answer. A type says which values are harmless: another value asks for something that is not
served, and is refused like a field of the wrong type.
"""

from typing import Any, Literal

from pydantic import Field

from baton.gateway.messages.base import Body, Count


def _harmless(reason: str) -> Any:
    return Field(None, description=f"accepted, does nothing: {reason}")


class HarmlessFields(Body):
    """Of every request that OpenAI defines."""

    user: str | None = _harmless("names an end user to OpenAI; here an API key names the tenant")
    safety_identifier: str | None = _harmless("the newer name of user")
    metadata: dict[str, Any] | None = _harmless("labels a stored answer, and nothing is stored; a response repeats it")
    store: bool | None = _harmless("nothing is stored; what would read a stored answer is refused")
    service_tier: Literal["auto", "default"] | None = _harmless("there is one tier; priority orders requests")
    prompt_cache_key: str | None = _harmless("the prefix cache finds equal prompts by themselves")
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = _harmless(
        "the prefix cache keeps what it has room for"
    )


class HarmlessChatFields(Body):
    prediction: dict[str, Any] | None = _harmless("makes an answer sooner, never another one")


class HarmlessResponseFields(Body):
    parallel_tool_calls: bool | None = _harmless("a response calls no tools")
    max_tool_calls: Count | None = _harmless("a response calls no tools")


class HarmlessGuidedFields(Body):
    guided_decoding_backend: str | None = _harmless("chooses a library; the answer has the form whichever it is")


class HarmlessStructureFields(Body):
    """Of structured_outputs."""

    disable_fallback: bool | None = _harmless("there is one library, and none to fall back to")
    disable_any_whitespace: bool | None = _harmless("JSON comes without white space, which both values allow")


class HarmlessMessageFields(Body):
    """Of a message that a client repeats as it got it."""

    annotations: list[Any] | None = _harmless("citations of an earlier answer, which no template shows")
    parsed: Any = _harmless("OpenAI's client adds it: the content once more, parsed")


class HarmlessItemFields(Body):
    """Of an item of a response that a client repeats as it got it."""

    id: str | None = _harmless("names an earlier answer")
    status: Literal["in_progress", "completed", "incomplete"] | None = _harmless("of an earlier answer")
    phase: Literal["commentary", "final_answer"] | None = _harmless("of an earlier answer; no template shows it")


class HarmlessCallFields(Body):
    """Of a function call that a client repeats as it got it."""

    index: Count | None = _harmless("its place in a stream; the list has an order already")


class HarmlessFunctionFields(Body):
    parsed_arguments: Any = _harmless("OpenAI's client adds it: the arguments once more, parsed")


class HarmlessPartFields(Body):
    """Of a part of a message."""

    cache_control: dict[str, Any] | None = _harmless("the prefix cache needs no marks")
    prompt_cache_breakpoint: dict[str, Any] | None = _harmless("the prefix cache needs no marks")


class HarmlessOutputFields(Body):
    """Of a part of a response that a client repeats as it got it."""

    annotations: list[Any] | None = _harmless("citations of an earlier answer, which no template shows")
    logprobs: list[Any] | None = _harmless("of an earlier answer")
