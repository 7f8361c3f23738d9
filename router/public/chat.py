"""A chat as its client asked for it, whatever the transport: its tools, its thoughts, and what reads its answer.

Names of fields in errors are those of OpenAI's chats, which both transports have.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from baton.generation.output.bounds import NoThoughts, channels_of, thoughts_before
from baton.generation.output.forced import Forced, own_form
from baton.generation.output.formats.choose import format_of
from baton.generation.output.formats.llama import LlamaReader
from baton.generation.output.pieces import Schemas, ToolParser
from baton.generation.output.thoughts import MakeParser, OutputParser, thoughts_of
from baton.generation.output.tool_calls import FirstCall, NamedParser
from baton.generation.structured.output import StructuredKind, StructuredOutput, json_schema
from baton.generation.structured.thoughts import form_of
from baton.router.model.chat_template import ChatTemplate
from baton.router.model.served_model import TokenizerWorker
from baton.router.types.request import ChatPrompt, GenerationRequest
from baton.service.errors import InvalidArgument

BUDGET = "thinking_budget"
THINKING, EFFORT = "enable_thinking", "reasoning_effort"
"""Their names in templates."""
_ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}


class ToolChoice(Enum):
    """Whether a function is called."""

    AUTO = "auto"  # as the model likes
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Function:
    """The one that has to be called."""

    name: str


@dataclass(frozen=True, slots=True)
class ToolsAsked:
    """`tools` are JSON objects as templates get them, which are OpenAI's."""

    tools: Sequence[Mapping[str, Any]] = ()
    choice: ToolChoice | Function = ToolChoice.AUTO
    one_call: bool = False

    @property
    def schemas(self) -> Schemas:
        return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}


@dataclass(frozen=True, slots=True)
class ChatAsked:
    """What is asked beside messages and sampling. `has_parts` false: the answer is text as the model wrote it, without
    tools and a budget."""

    tools: ToolsAsked = ToolsAsked()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    enable_thinking: bool | None = None
    effort: str | None = None
    budget: int | None = None  # tokens of thoughts
    shows_thoughts: bool = True
    has_parts: bool = True


@dataclass(frozen=True, slots=True)
class ReadChat:
    """A request, and what makes a reader of each choice; None: an answer is text alone."""

    request: GenerationRequest
    parser: MakeParser | None
    is_forced: bool = False  # its form is that of a call

    def reader(self) -> OutputParser:
        return self.parser() if self.parser is not None else OutputParser(None, None)


@dataclass(frozen=True, slots=True)
class _ToolUse:
    """`shown` are the tools that the template gets; `parser` makes a reader for each choice, None: all is text."""

    shown: Sequence[Mapping[str, Any]] = ()
    forced: StructuredOutput | None = None
    parser: Callable[[], ToolParser] | None = None
    shown_tokens: frozenset[str] = frozenset()  # special tokens that the parser reads


async def read_chat(request: GenerationRequest, asked: ChatAsked, tokenizer: TokenizerWorker) -> ReadChat:
    """`request` is the chat without all that `asked` has. Raises: InvalidArgument, Unavailable."""
    template, prompt, sampling = tokenizer.chat_template, request.prompt, request.sampling
    if not isinstance(prompt, ChatPrompt):
        raise TypeError("a chat has messages")
    tools = _tool_use(asked.tools, tokenizer)
    if tools.forced is not None and sampling.structured is not None:
        raise InvalidArgument(
            "tool_choice", "a function that must be called and a form of the answer exclude each other"
        )
    prompt = replace(prompt, tools=tools.shown, template_options=chat_options(asked, template))
    request = replace(request, prompt=prompt)
    if not asked.has_parts:
        return ReadChat(request, None)
    if sampling.structured is None:
        request = replace(request, shown_tokens=tools.shown_tokens)
    if tools.forced is not None:
        sampling = replace(sampling, structured=tools.forced)
        request = replace(request, sampling=sampling, shown_tokens=tools.shown_tokens)
    ending = ""
    if template is not None:
        ending = await template.ending(prompt.template_options, prompt.add_generation_prompt, request.tenant)
    request = _bounded(request, asked, tools, template, ending)
    return ReadChat(request, _parser(request, asked, tools, template, ending), tools.forced is not None)


def check_shown(template: ChatTemplate | None) -> None:
    """Raises: InvalidArgument where the model would not see the tools that a request has."""
    if template is not None and "tools" not in template.variables:
        message = "this model's chat template does not show them; tool_choice can still force a call"
        raise InvalidArgument("tools", message)


def asked_to_think(
    asked: bool | None, otherwise: bool | None, field: str, template: ChatTemplate | None
) -> bool | None:
    """The template's option: as a client asked in `field`, or `otherwise`; None where the template has no such option.

    Raises: InvalidArgument for what the model cannot do.
    """
    if template is not None and THINKING in template.variables:
        return otherwise if asked is None else asked
    thinks = template is not None and thoughts_of(template.source, "") is not None
    if asked and not thinks:
        raise InvalidArgument(field, "this model does not think before it answers")
    if asked is False and thinks:
        raise InvalidArgument(field, "this model always thinks before it answers")
    return None


def chat_options(asked: ChatAsked, template: ChatTemplate | None) -> Mapping[str, Any]:
    """Raises: InvalidArgument."""
    options = dict(asked.template_options)
    _set(options, THINKING, asked.enable_thinking, THINKING)
    reads = template.variables if template is not None else frozenset[str]()
    if asked.effort is not None and EFFORT not in reads and THINKING in reads:
        _set(options, THINKING, asked.effort != "none", EFFORT)
    else:
        _set(options, EFFORT, asked.effort, EFFORT)
    return options


def _set(options: dict[str, Any], name: str, value: object, field: str) -> None:
    """Raises: InvalidArgument where another field has said something else."""
    if value is not None and options.setdefault(name, value) != value:
        raise InvalidArgument(field, f"{name} of the chat template is set to something else by another field")


def _tool_use(asked: ToolsAsked, tokenizer: TokenizerWorker) -> _ToolUse:
    """Raises: InvalidArgument."""
    tools, choice, template = asked.tools, asked.choice, tokenizer.chat_template
    taught, schemas = format_of(template), asked.schemas
    if not tools and choice not in (ToolChoice.AUTO, ToolChoice.NONE):
        raise InvalidArgument("tool_choice", "there are no tools to choose from")
    if not tools or choice is ToolChoice.NONE:
        if taught is None or not taught.has_channels:
            return _ToolUse()
        return _ToolUse((), None, lambda: taught.reader({}), taught.special)
    if isinstance(choice, Function):
        if choice.name not in schemas:
            raise InvalidArgument("tool_choice.function.name", f"there is no tool {choice.name!r}")
        schemas = {choice.name: schemas[choice.name]}
    if choice is ToolChoice.AUTO:
        check_shown(template)
        if taught is None:
            return _ToolUse(tools)
        reader = lambda: FirstCall(taught.reader(schemas)) if asked.one_call else taught.reader(schemas)  # noqa: E731
        return _ToolUse(tools, None, reader, taught.special)
    if taught is not None and template is not None and "tools" in template.variables:
        several = not asked.one_call and not isinstance(choice, Function)
        own = own_form(taught.name, Forced(schemas, several, template.source, tokenizer.added_tokens))
        if own is not None:
            return _ToolUse(tools, own, lambda: taught.reader(schemas), taught.special)
    return _forced_as_json(asked, schemas)


def _forced_as_json(asked: ToolsAsked, schemas: Schemas) -> _ToolUse:
    """Where the model has no format, or it cannot say the schema."""
    if isinstance(asked.choice, Function):
        name = asked.choice.name
        return _ToolUse(asked.tools, json_schema(schemas[name] or _ANY_ARGUMENTS), lambda: NamedParser(name))
    form = json_schema(_calls_schema(schemas, 1 if asked.one_call else None))
    return _ToolUse(asked.tools, form, lambda: LlamaReader(schemas))


def _calls_schema(schemas: Schemas, most: int | None) -> dict[str, Any]:
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": schema or _ANY_ARGUMENTS},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, schema in schemas.items()
    ]
    bounds = {"minItems": 1} | ({"maxItems": most} if most is not None else {})
    return {"type": "array", "items": {"anyOf": calls}, **bounds}


def _bounded(
    request: GenerationRequest, asked: ChatAsked, tools: _ToolUse, template: ChatTemplate | None, ending: str
) -> GenerationRequest:
    """With what the model may think. Calls that are forced bring their own thoughts in channels.

    `ending`: the last characters of the prompt. Raises: InvalidArgument.
    """
    form, budget, channels = request.sampling.structured, asked.budget, channels_of(template)
    if channels is not None and tools.forced is not None:
        if budget is not None:
            raise InvalidArgument(BUDGET, "does not go with a function that must be called, by a model with channels")
        return request
    if budget is None and form is None:
        return request
    try:
        thoughts = thoughts_before(form, budget, template, ending)
    except NoThoughts as error:
        raise InvalidArgument(BUDGET, str(error)) from error
    if channels is not None:
        request = replace(request, shown_tokens=channels.special)
    if thoughts is None:
        return request
    return replace(request, sampling=replace(request.sampling, structured=thoughts.output()))


def _parser(
    request: GenerationRequest, asked: ChatAsked, tools: _ToolUse, template: ChatTemplate | None, ending: str
) -> MakeParser | None:
    """None where an answer is text alone. Before a form there are thoughts only if the request has room for them."""
    thoughts, structured = None, request.sampling.structured
    has_thoughts = structured is None or structured.kind is StructuredKind.THOUGHTS
    if template is not None and has_thoughts:
        thoughts = thoughts_of(template.source, ending)
    parser = tools.parser
    if form_of(structured) is not None and tools.forced is None and not (has_thoughts and request.shown_tokens):
        parser = None  # nothing is called, and there are no channels: the text is the form
    if thoughts is None and parser is None:
        return None
    return lambda: OutputParser(thoughts and thoughts(), parser and parser(), asked.shows_thoughts)
