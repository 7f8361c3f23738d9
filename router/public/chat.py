"""Options of a chat from gRPC or HTTP: tools, reasoning, and the parser of its answer.

Errors name fields as OpenAI's chat API does, both for gRPC and for HTTP.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from baton.process.errors import InvalidArgument
from baton.router.model.chat_template import ChatTemplate
from baton.router.model.generic_tools import texts_of_calls
from baton.router.model.served_model import TokenizerWorker
from baton.router.public.tools import ToolsAsked, ToolUse, tool_use
from baton.router.types.request import ChatPrompt, GenerationRequest
from baton.text.output.bounds import NoThoughts, channels_of, thoughts_before
from baton.text.output.thoughts import MakeParser, OutputParser, thoughts_of
from baton.text.structured.output import FormRefused, StructuredKind, StructuredOutput, enforceable_form

BUDGET = "thinking_budget"
THINKING, EFFORT = "enable_thinking", "reasoning_effort"
"""Names of the options in chat templates that switch reasoning and set its effort."""


@dataclass(frozen=True, slots=True)
class ChatAsked:
    """Options of a chat besides messages and sampling. `has_parts` False: the answer is sent as plain text."""

    tools: ToolsAsked = field(default_factory=ToolsAsked)
    template_options: Mapping[str, Any] = field(default_factory=dict)
    enable_thinking: bool | None = None
    effort: str | None = None
    budget: int | None = None  # maximum number of reasoning tokens
    shows_thoughts: bool = True
    has_parts: bool = True


@dataclass(frozen=True, slots=True)
class ReadChat:
    """Request of a chat with its options applied. `parser` creates a choice's parser; None: no parser is needed."""

    request: GenerationRequest
    parser: MakeParser | None
    tool_forms: frozenset[str] = frozenset()  # fields of structured output that was derived from the tools

    def reader(self) -> OutputParser:
        return self.parser() if self.parser is not None else OutputParser(None, None)


async def read_chat(request: GenerationRequest, asked: ChatAsked, tokenizer: TokenizerWorker) -> ReadChat:
    """Apply the options `asked` to a chat request. Raises: InvalidArgument, Unavailable."""
    template, prompt, sampling = tokenizer.chat_template, request.prompt, request.sampling
    if not isinstance(prompt, ChatPrompt):
        raise TypeError(f"the prompt must be a ChatPrompt, not a {type(prompt).__name__}")
    form = _held(sampling.structured)
    tools = tool_use(asked.tools, form, tokenizer)
    shown = [tool for tool in tools.shown if tool["function"]["name"] not in asked.tools.deferred]
    if asked.tools.tools and not shown and template is not None and not template.shows_tools:
        prompt = replace(prompt, messages=texts_of_calls(prompt.messages))
    prompt = replace(prompt, tools=shown, template_options=chat_options(asked, template))
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
    """Return the requested structured output, converted to what a grammar can enforce. Raises: InvalidArgument."""
    if form is None:
        return None
    try:
        return enforceable_form(form)
    except FormRefused as refusal:
        raise InvalidArgument(form.field, str(refusal)) from refusal


def thinks(template: ChatTemplate | None) -> bool:
    """Return whether the model reasons before it answers, judging by its chat template."""
    return template is not None and (thoughts_of(template.source, "") is not None or channels_of(template) is not None)


def asked_to_think(
    asked: bool | None, otherwise: bool | None, field: str, template: ChatTemplate | None
) -> bool | None:
    """Return the value for the template's option to reason; None if the template has no such option.

    `asked`: the client's value, from `field`; None: `otherwise` is used. Raises: InvalidArgument if the model cannot
    do what was asked.
    """
    if template is not None and THINKING in template.variables:
        return otherwise if asked is None else asked
    if asked and not thinks(template):
        raise InvalidArgument(field, "this model does not reason before it answers")
    if asked is False and thinks(template):
        raise InvalidArgument(field, "this model always reasons before it answers")
    return None


def chat_options(asked: ChatAsked, template: ChatTemplate | None) -> Mapping[str, Any]:
    """Return the options for the chat template, from all fields that set one. Raises: InvalidArgument.

    If the model never reasons, a client's option that disables reasoning is left out.
    """
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
    """Set template option `name`. Raises: InvalidArgument for `field` if another field has set a different value."""
    if value is not None and options.setdefault(name, value) != value:
        raise InvalidArgument(field, f"another field sets {name} of the chat template to a different value")


def _bounded(
    request: GenerationRequest, asked: ChatAsked, tools: ToolUse, template: ChatTemplate | None, ending: str
) -> GenerationRequest:
    """Return the request with structured output that limits reasoning to the budget.

    `ending`: last characters of the rendered prompt. Raises: InvalidArgument.
    """
    form, budget, channels = request.sampling.structured, asked.budget, channels_of(template)
    if channels is not None and tools.has_calls:
        if budget is not None:
            raise InvalidArgument(BUDGET, "cannot be combined with forced calls for this model; remove one of the two")
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
    """Return a function that creates the parser of a choice; None if the answer is plain text."""
    thoughts, structured = None, request.sampling.structured
    has_thoughts = structured is None or structured.kind is StructuredKind.THOUGHTS
    if template is not None and has_thoughts:
        thoughts = thoughts_of(template.source, ending)
    parser = tools.parser
    if thoughts is None and parser is None:
        return None
    return lambda: OutputParser(thoughts and thoughts(), parser and parser(), asked.shows_thoughts)
