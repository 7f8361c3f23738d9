"""Tools of a chat: what the template shows of them, structured output for forced calls, and the parser of calls.

A *form* is structured output: the grammar that an answer must follow. Errors name fields as OpenAI's chat API does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from baton.process.errors import InvalidArgument
from baton.router.model.chat_template import ChatTemplate
from baton.router.model.generic_tools import NAME
from baton.router.model.served_model import TokenizerWorker
from baton.text.output.forced import ForcedCalls, call_schema, json_form, own_form
from baton.text.output.formats.choose import FORMATS, Format, format_of
from baton.text.output.formats.llama import LlamaReader
from baton.text.output.pieces import Schemas, ToolParser
from baton.text.output.tool_calls import CallsOrForm, FirstCall, NamedParser
from baton.text.structured.output import FormRefused, StructuredOutput, enforceable_form, json_schema
from baton.text.structured.schema import SchemaRefused, enforceable_schema

_ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolChoice(Enum):
    """Rule for whether the model calls functions. A choice that forces a certain function is a `Function` instead."""

    AUTO = "auto"  # the model decides whether it calls functions
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Function:
    """Tool choice: the function that the model must call."""

    name: str


@dataclass(frozen=True, slots=True)
class ToolsAsked:
    """Tools of a request: JSON objects in OpenAI's format, as templates get them. `one_call`: at most one call.

    `deferred`: names of tools that the template does not get, since a message describes them. `grammars`: by name of a
    tool with free text, the form of the text.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    choice: ToolChoice | Function = ToolChoice.AUTO
    one_call: bool = False
    deferred: frozenset[str] = frozenset()
    grammars: Mapping[str, StructuredOutput] = field(default_factory=dict)

    def schemas(self) -> Schemas:
        """Return the JSON schemas of the functions' arguments, by function name. Raises: InvalidArgument."""
        return {tool["function"]["name"]: _arguments(place, tool["function"]) for place, tool in enumerate(self.tools)}

    def field_of(self, name: str) -> str:
        """Return the path of a function in the request."""
        return _field([tool["function"]["name"] for tool in self.tools].index(name))

    def held(self, schemas: Schemas, has_to: bool) -> Schemas:
        """Return the schemas, converted to what a grammar can enforce. Raises: InvalidArgument.

        A schema that no grammar can enforce is rejected if `has_to`; otherwise its function may get any arguments.
        """
        places = {tool["function"]["name"]: place for place, tool in enumerate(self.tools)}
        made: dict[str, Mapping[str, Any]] = {}
        for name, schema in schemas.items():
            try:
                made[name] = enforceable_schema(schema)
            except SchemaRefused as refusal:
                if has_to:
                    raise InvalidArgument(f"{_field(places[name])}.parameters", str(refusal)) from refusal
                made[name] = _ANY_ARGUMENTS
        return made


def _arguments(place: int, function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a function's arguments. Without `parameters`, none are allowed. Raises: InvalidArgument."""
    schema = function.get("parameters")
    if schema is None:
        return _NO_ARGUMENTS
    stated = schema.get("type", "object")
    if stated != "object" and not (isinstance(stated, list) and "object" in stated):
        raise InvalidArgument(f"{_field(place)}.parameters.type", "must be object")
    return {**schema, "type": "object"}


def _field(place: int) -> str:
    return f"tools[{place}].function"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Handling of a request's tools. `shown`: tools for the template. `form`: form of the answer. `has_calls`: the
    form contains calls. `parser`: creates a choice's parser; None: the answer is plain text.
    """

    shown: Sequence[Mapping[str, Any]] = ()
    form: StructuredOutput | None = None
    has_calls: bool = False
    parser: Callable[[], ToolParser] | None = None
    shown_tokens: frozenset[str] = frozenset()  # special tokens that must stay in the text for the parser


def tool_use(asked: ToolsAsked, form: StructuredOutput | None, tokenizer: TokenizerWorker) -> ToolUse:
    """Decide how tools are handled. `form`: requested form of an answer without calls. Raises: InvalidArgument."""
    tools, choice, template = asked.tools, asked.choice, tokenizer.chat_template
    schemas = asked.schemas()
    if not tools and choice not in (ToolChoice.AUTO, ToolChoice.NONE):
        raise InvalidArgument("tool_choice", "requires tools")
    if not tools or choice is ToolChoice.NONE:
        own = format_of(template)
        if own is None or not own.has_channels:
            return ToolUse(form=form)
        return ToolUse(form=form, parser=lambda: own.reader({}), shown_tokens=own.special)
    taught = _format(template)
    if isinstance(choice, Function):
        if choice.name not in schemas:
            raise InvalidArgument("tool_choice.function.name", f"{choice.name!r} is not among the tools")
        schemas = {choice.name: schemas[choice.name]}
    if choice is ToolChoice.AUTO:
        if form is not None:
            return _call_or_form(asked, form, tokenizer, taught)
        if taught is None:
            return ToolUse(tools)
        reader = lambda: FirstCall(taught.reader(schemas)) if asked.one_call else taught.reader(schemas)  # noqa: E731
        return ToolUse(tools, parser=reader, shown_tokens=taught.special)
    forced = [name for name in schemas if name in asked.grammars]
    if forced and len(schemas) == 1 and not (taught is not None and taught.has_channels):
        return ToolUse(tools, _grammar(asked, forced[0]), True, lambda: NamedParser(forced[0]))
    if forced:
        message = "its grammar is enforced only if tool_choice names it and the model's format has no channels; "
        message += "set tool_choice to its name, or to auto"
        raise InvalidArgument(asked.field_of(forced[0]), message)
    held = asked.held(schemas, has_to=True)
    if taught is not None and template is not None:
        several = not asked.one_call and not isinstance(choice, Function)
        calls_form = own_form(taught.name, ForcedCalls(held, several, template.source, tokenizer.added_tokens))
        if calls_form is not None:
            return ToolUse(tools, calls_form, True, lambda: taught.reader(schemas), taught.special)
    if isinstance(choice, Function):
        name = choice.name
        return ToolUse(tools, json_schema(held[name]), True, lambda: NamedParser(name))
    calls = json_schema(_calls_schema(held, 1 if asked.one_call else None))
    return ToolUse(tools, calls, True, lambda: LlamaReader(schemas))


def _grammar(asked: ToolsAsked, name: str) -> StructuredOutput:
    """Return the form of a forced call of a tool with a grammar: the text itself. Raises: InvalidArgument."""
    try:
        return enforceable_form(asked.grammars[name])
    except FormRefused as refusal:
        raise InvalidArgument(asked.field_of(name), str(refusal)) from refusal


def _call_or_form(
    asked: ToolsAsked, form: StructuredOutput, tokenizer: TokenizerWorker, taught: Format | None
) -> ToolUse:
    """Decide for a request with tools and a form: the answer is either calls or has the form.

    Raises: InvalidArgument.
    """
    template, held = tokenizer.chat_template, asked.held(asked.schemas(), has_to=False)
    source = template.source if template is not None else ""
    forced = ForcedCalls(held, not asked.one_call, source, tokenizer.added_tokens, form)
    if taught is not None and (own := own_form(taught.name, forced)) is not None:
        reader = lambda: CallsOrForm(taught.reader(held), taught.begins)  # noqa: E731
        return ToolUse(asked.tools, own, True, reader, taught.special)
    either = json_form(forced, _calls_schema(held, 1 if asked.one_call else None))
    if either is None:
        message = "is too large to combine with tools, or has %ignore or %llguidance; set tool_choice to none"
        raise InvalidArgument(form.field, message)
    return ToolUse(asked.tools, either, True, lambda: LlamaReader(held))


def _format(template: ChatTemplate | None) -> Format | None:
    """Return the format of calls: the template's own, or the generic one if it does not show tools."""
    return FORMATS[NAME] if template is not None and not template.shows_tools else format_of(template)


def _calls_schema(schemas: Schemas, most: int | None) -> dict[str, Any]:
    """Return a schema for an array of calls, for models whose own format of calls is unknown or cannot be enforced.

    `most`: maximum number of calls; None: unlimited.
    """
    calls = []
    for place, (name, schema) in enumerate(schemas.items()):
        call = call_schema(name, "parameters", {})
        call["properties"]["parameters"] = _moved(schema, f"#/items/anyOf/{place}/properties/parameters")
        calls.append(call)
    bounds = {"minItems": 1} | ({"maxItems": most} if most is not None else {})
    return {"type": "array", "items": {"anyOf": calls}, **bounds}


def _moved(schema: Any, pointer: str) -> Any:
    """Return a schema whose references are adapted to its position `pointer` in a larger schema."""
    if isinstance(schema, list):
        return [_moved(each, pointer) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: value if key in ("const", "enum") else _moved(value, pointer) for key, value in schema.items()}
    if isinstance(ref := moved.get("$ref"), str):
        moved["$ref"] = pointer + ref.removeprefix("#")
    return moved
