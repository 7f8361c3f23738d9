"""Options of a chat, whatever the transport: tools, reasoning, and the parser of its answer.

Errors use the field names of OpenAI's chat API, which all transports share.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from baton.process.errors import InvalidArgument
from baton.router.model.chat_template import ChatTemplate
from baton.router.model.served_model import TokenizerWorker
from baton.router.public.tools import ToolsAsked, ToolUse, tool_use
from baton.router.types.request import ChatPrompt, GenerationRequest
from baton.text.output.bounds import NoThoughts, channels_of, thoughts_before
from baton.text.output.thoughts import MakeParser, OutputParser, thoughts_of
from baton.text.structured.output import FormRefused, StructuredKind, StructuredOutput, enforceable_form

BUDGET = "thinking_budget"
THINKING, EFFORT = "enable_thinking", "reasoning_effort"
"""Names of these options in templates."""


@dataclass(frozen=True, slots=True)
class ChatAsked:
    """Options of a chat in addition to messages and sampling. `has_parts` False: the answer is plain text."""

    tools: ToolsAsked = field(default_factory=ToolsAsked)
    template_options: Mapping[str, Any] = field(default_factory=dict)
    enable_thinking: bool | None = None
    effort: str | None = None
    budget: int | None = None  # maximum tokens of reasoning
    shows_thoughts: bool = True
    has_parts: bool = True


@dataclass(frozen=True, slots=True)
class ReadChat:
    """Request of a chat, and the factory of a parser for each choice; None: the answer is plain text."""

    request: GenerationRequest
    parser: MakeParser | None
    tool_forms: frozenset[str] = frozenset()  # fields of a form that was derived from the tools

    def reader(self) -> OutputParser:
        return self.parser() if self.parser is not None else OutputParser(None, None)


async def read_chat(request: GenerationRequest, asked: ChatAsked, tokenizer: TokenizerWorker) -> ReadChat:
    """Apply the options `asked` to a chat. Raises: InvalidArgument, Unavailable."""
    template, prompt, sampling = tokenizer.chat_template, request.prompt, request.sampling
    if not isinstance(prompt, ChatPrompt):
        raise TypeError("a chat has messages")
    form = _held(sampling.structured)
    tools = tool_use(asked.tools, form, tokenizer)
    prompt = replace(prompt, tools=tools.shown, template_options=chat_options(asked, template))
    request = replace(request, prompt=prompt, sampling=replace(sampling, structured=tools.form))
    if not asked.has_parts:
        return ReadChat(request, None)
    request = replace(request, shown_tokens=tools.shown_tokens, own_form=form if tools.has_calls else None)
    ending = ""
    if template is not None:
        ending = await template.ending(prompt.template_options, prompt.add_generation_prompt, request.tenant)
    request = _bounded(request, asked, tools, template, ending)
    made = {tools.form.field} if tools.form is not None and tools.has_calls else set[str]()
    tool_forms = frozenset(made - {form.field if form is not None else ""})
    return ReadChat(request, _parser(request, asked, tools, template, ending), tool_forms)


def _held(form: StructuredOutput | None) -> StructuredOutput | None:
    """Return the form as a grammar enforces it. Raises: InvalidArgument."""
    if form is None:
        return None
    try:
        return enforceable_form(form)
    except FormRefused as refusal:
        raise InvalidArgument(form.field, str(refusal)) from refusal


def thinks(template: ChatTemplate | None) -> bool:
    """Return whether the model reasons before it answers, by its template."""
    return template is not None and (thoughts_of(template.source, "") is not None or channels_of(template) is not None)


def asked_to_think(
    asked: bool | None, otherwise: bool | None, field: str, template: ChatTemplate | None
) -> bool | None:
    """Return the value of the template's option: the client's in `field`, or `otherwise`; None without such an option.

    Raises: InvalidArgument if the model cannot do it.
    """
    if template is not None and THINKING in template.variables:
        return otherwise if asked is None else asked
    if asked and not thinks(template):
        raise InvalidArgument(field, "this model does not reason before it answers")
    if asked is False and thinks(template):
        raise InvalidArgument(field, "this model always reasons before it answers")
    return None


def chat_options(asked: ChatAsked, template: ChatTemplate | None) -> Mapping[str, Any]:
    """Return the template's options, without disabled reasoning for a model that has none. Raises: InvalidArgument."""
    options = dict(asked.template_options)
    _set(options, THINKING, asked.enable_thinking, THINKING)
    reads = template.variables if template is not None else frozenset[str]()
    if asked.effort is not None and EFFORT not in reads and (THINKING in reads or asked.effort == "none"):
        _set(options, THINKING, asked.effort != "none", EFFORT)
    else:
        _set(options, EFFORT, asked.effort, EFFORT)
    if options.get(THINKING) is False and THINKING not in reads and not thinks(template):
        del options[THINKING]
    return options


def _set(options: dict[str, Any], name: str, value: object, field: str) -> None:
    """Set an option. Raises: InvalidArgument if another field has set it differently."""
    if value is not None and options.setdefault(name, value) != value:
        raise InvalidArgument(field, f"another field sets {name} of the chat template to a different value")


def _bounded(
    request: GenerationRequest, asked: ChatAsked, tools: ToolUse, template: ChatTemplate | None, ending: str
) -> GenerationRequest:
    """Return the request with the budget of reasoning. `ending`: last characters of the prompt.

    Raises: InvalidArgument.
    """
    form, budget, channels = request.sampling.structured, asked.budget, channels_of(template)
    if channels is not None and tools.has_calls:
        if budget is not None:
            raise InvalidArgument(BUDGET, "cannot be combined with forced calls, since this model has channels")
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
    request: GenerationRequest, asked: ChatAsked, tools: ToolUse, template: ChatTemplate | None, ending: str
) -> MakeParser | None:
    """Return the factory of the answer's parser; None if the answer is plain text."""
    thoughts, structured = None, request.sampling.structured
    has_thoughts = structured is None or structured.kind is StructuredKind.THOUGHTS
    if template is not None and has_thoughts:
        thoughts = thoughts_of(template.source, ending)
    parser = tools.parser
    if thoughts is None and parser is None:
        return None
    return lambda: OutputParser(thoughts and thoughts(), parser and parser(), asked.shows_thoughts)
