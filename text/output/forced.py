"""Grammars of function calls in the model's own format, if calls are required or may replace structured output. Pure.

Some formats cannot express every schema: if values are text between tags, strings with a pattern or a length cannot be
expressed. Required calls of functions with such schemas are in JSON, whatever the format; if calls are only allowed,
the arguments of such functions are unconstrained.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.text.output.formats import deepseek, glm, harmony, hermes, mistral, pythonic, qwen_coder
from baton.text.output.formats.reader import NAME
from baton.text.output.pieces import Schemas
from baton.text.structured.library import ANY_OBJECT, COMPACT
from baton.text.structured.output import MAX_BYTES, StructuredKind, StructuredOutput, choices_of

GUIDANCE = "x-guidance"
_SPACED = {**COMPACT, "item_separator": ", ?", "key_separator": ": ?"}
"""llguidance options for JSON with the spaces that chat templates write, or without."""
_KEY = re.compile(r"[\w.\-]+")
_OBJECT = {"type", "properties", "required", "additionalProperties", "description", "title", "$defs", "$schema"}
"""Keywords of a schema whose properties can be written one by one."""
_PLAIN_TEXT = {"type", "description", "title", "default", "examples"}
"""Keywords of an unconstrained string."""
_DEFINITIONS = ("$defs", "definitions")
_PYTHON_WORDS = {"boolean": '"True" | "False"', "null": '"None"'}


_LARK = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//[^\n]*|(?P<start>\bstart\b)|(?P<directive>%(?:ignore|llguidance)\b)'
)
"""Texts, patterns and comments of llguidance's Lark, which contain no rule names; the rule `start`; directives."""


class Inexpressible(Exception):
    """Error: the format cannot express the schema of a call."""


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """Function calls that a grammar must allow.

    `schemas`: schemas of the arguments, by function. `several`: whether more than one call is allowed. `source`: chat
    template, from which the variant of a format is recognised. `tokens`: ids of the tokenizer's added tokens, by text.
    `otherwise`: structured output of an answer without calls; None: a call is required.
    """

    schemas: Schemas
    several: bool
    source: str
    tokens: Mapping[str, int]
    otherwise: StructuredOutput | None = None


class CallGrammar:
    """Builder of a grammar for calls, in llguidance's variant of Lark."""

    def __init__(self, asked: ForcedCalls) -> None:
        self.asked = asked
        self._rules: list[str] = []

    def tag(self, text: str) -> str:
        """Return the expression of a tag: its token if the tokenizer has one, else its text."""
        token_id = self.asked.tokens.get(text)
        return _literal(text) if token_id is None else f"<[{token_id}]>"

    def rule(self, expression: str, attributes: str = "") -> str:
        name = f"baton{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        if GUIDANCE in schema:
            raise Inexpressible
        return self.rule(f"%json {json.dumps({**schema, GUIDANCE: _SPACED}, ensure_ascii=False)}")

    def arguments(self, schema: Mapping[str, Any]) -> str:
        """Add the rule of a call's arguments, a JSON object; return its name. Raises: Inexpressible."""
        if schema.get("type") != "object":
            raise Inexpressible
        return self.json(schema)

    def call_object(self, name: str, key: str, schema: Mapping[str, Any]) -> str:
        """Return the expression of a call that is one JSON object."""
        begin = _literal(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ')
        return f'{begin} {self.arguments(schema)} "}}"'

    def form(self, asked: StructuredOutput) -> str:
        """Add the rule of an answer without calls; return its name. Raises: Inexpressible for global directives."""
        match asked.kind:
            case StructuredKind.JSON_SCHEMA | StructuredKind.JSON_OBJECT:
                schema = json.loads(asked.text or ANY_OBJECT)
                return self.rule(f"%json {json.dumps({**schema, GUIDANCE: COMPACT}, ensure_ascii=False)}")
            case StructuredKind.REGEX:
                return self.rule(f"/{_in_slashes(asked.text)}/")
            case StructuredKind.CHOICE:
                return self.rule(" | ".join(map(_literal, choices_of(asked))))
        name = f"baton{len(self._rules)}"
        found = list(_LARK.finditer(asked.text))
        if asked.kind is not StructuredKind.GRAMMAR or any(match["directive"] for match in found):
            raise Inexpressible
        self._rules.append(_LARK.sub(lambda match: name if match["start"] else match[0], asked.text))
        return name

    def value(self, schema: Mapping[str, Any], root: Mapping[str, Any], break_before: str, end: str) -> str:
        """Return the expression of a value and the tag `end`. Strings are plain text, other values JSON.

        Raises: Inexpressible.
        """
        texts = schema.get("enum") if "enum" in schema else [schema["const"]] if "const" in schema else None
        ending = f"{_literal(break_before)} {self.tag(end)}" if break_before else self.tag(end)
        if schema.get("type", "string") == "string" and isinstance(texts, list):
            if not texts or not all(isinstance(text, str) and text for text in texts):
                raise Inexpressible
            return f"({' | '.join(map(_literal, texts))}) {ending}"
        if schema.get("type") == "string":
            if schema.keys() - _PLAIN_TEXT:
                raise Inexpressible
            return self.text_until(break_before, end)
        if not isinstance(schema.get("type"), str):
            raise Inexpressible
        return f"{self.json(_with_definitions(schema, root))} {ending}"

    def text_until(self, break_before: str, end: str) -> str:
        """Return the expression of any text up to the first tag `end`, and of the tag: its token if it has one."""
        broken = re.escape(break_before).replace("\n", "n")
        if end in self.asked.tokens:
            return f"{self.rule(f'/(?s:.*){broken}/')} {self.tag(end)}"
        return self.rule(f"/(?s:.*){broken}{_in_slashes(re.escape(end))}/", "[lazy]")

    def text(self, calls: str) -> str:
        """Return the complete grammar. `calls`: expression of everything that the model may write."""
        return "\n".join([f"start: {calls}", *self._rules])


Write = Callable[[CallGrammar, str, Mapping[str, Any]], str]


@dataclass(frozen=True, slots=True)
class _Frame:
    """Syntax of calls in one format. All values are expressions of a grammar, or functions that return one.

    `call`: one call. `free`: one call with any arguments. `before`: text before the first call. `between`: text between
    two calls. `behind`: text after the last call. `thought`: reasoning before a call or an answer. `answer`: text that
    begins an answer without calls.
    """

    call: Write
    before: str = ""
    between: str = ""
    behind: str = ""
    has_several: bool = True
    free: Callable[[CallGrammar, str], str] | None = None
    thought: str = ""
    answer: str = ""

    def written(self, grammar: CallGrammar, name: str, schema: Mapping[str, Any]) -> str:
        """Return the expression of a call. Raises: Inexpressible."""
        try:
            return self.call(grammar, name, schema)
        except Inexpressible:
            if self.free is None or grammar.asked.otherwise is None:
                raise
            return self.free(grammar, name)


def own_form(name: str, asked: ForcedCalls) -> StructuredOutput | None:
    """Return structured output for these calls in the format `name`; None if the format cannot express them."""
    grammar = CallGrammar(asked)
    try:
        frame = _FRAMES[name](grammar)
        made = " | ".join(grammar.rule(frame.written(grammar, *each)) for each in asked.schemas.items())
        call = grammar.rule(made)
        further = f"({frame.between} {call})*" if asked.several and frame.has_several else ""
        calls = " ".join(part for part in (frame.before, call, further, frame.behind) if part)
        if asked.otherwise is not None:
            calls = f"({calls} | {frame.answer} {grammar.form(asked.otherwise)})"
    except Inexpressible:
        return None
    # Reasoning models write one or two line breaks after the reasoning.
    lead = r'("\n\n" | "\n")?' if "</think>" in asked.source else ""
    return _grammar_form(grammar.text(" ".join(part for part in (lead, frame.thought, calls) if part)))


def json_form(asked: ForcedCalls, as_objects: Mapping[str, Any]) -> StructuredOutput | None:
    """Return structured output for calls in JSON or `asked.otherwise`; None if no grammar can combine them.

    `as_objects`: JSON schema of the calls.
    """
    grammar = CallGrammar(asked)
    try:
        calls = grammar.form(StructuredOutput(StructuredKind.JSON_SCHEMA, json.dumps(as_objects, ensure_ascii=False)))
        return (
            None
            if asked.otherwise is None
            else _grammar_form(grammar.text(f"{calls} | {grammar.form(asked.otherwise)}"))
        )
    except Inexpressible:
        return None


def _grammar_form(text: str) -> StructuredOutput | None:
    return StructuredOutput(StructuredKind.GRAMMAR, text) if len(text.encode()) <= MAX_BYTES else None


def call_schema(name: str, key: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a call that is one JSON object. `schema`: schema of the arguments; may have references."""
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: {"$id": f"urn:baton:{name}", **schema}},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _hermes(grammar: CallGrammar) -> _Frame:
    begin, end = grammar.tag(hermes.OPEN) + r' "\n" ', r' "\n" ' + grammar.tag(hermes.CLOSE)
    return _Frame(lambda g, name, schema: begin + g.call_object(name, "arguments", schema) + end, between=r'"\n"')


def _llama(grammar: CallGrammar) -> _Frame:
    """Return the frame of Llama 3.

    `call_object` does not work here: its first lexeme begins with a brace but is longer. An answer without calls may
    also begin with a brace, and then the lexeme must be the brace alone.
    """
    return _Frame(lambda g, name, schema: g.json(call_schema(name, "parameters", schema)), between='"; "')


def _mistral(grammar: CallGrammar) -> _Frame:
    opening, arguments = grammar.tag(mistral.OPEN), grammar.tag(mistral.ARGUMENTS)
    if mistral.ARGUMENTS in grammar.asked.source:
        return _Frame(lambda g, name, schema: f"{opening} {_named(name)} {arguments} {g.arguments(schema)}")
    return _Frame(lambda g, name, schema: g.call_object(name, "arguments", schema), f'{opening} " ["', '", "', '"]"')


def _deepseek(grammar: CallGrammar) -> _Frame:
    begin, end, separator = map(grammar.tag, (deepseek.CALL, deepseek.CALL_END, deepseek.SEPARATOR))
    before, behind = grammar.tag(deepseek.CALLS), grammar.tag(deepseek.CALLS_END)

    def fenced(g: CallGrammar, name: str, schema: Mapping[str, Any]) -> str:
        opening = _literal(f"{_checked(name)}\n```json\n")
        return f'{begin} "function" {separator} {opening} {g.arguments(schema)} "\\n```" {end}'

    def bare(g: CallGrammar, name: str, schema: Mapping[str, Any]) -> str:
        return f"{begin} {_named(name)} {separator} {g.arguments(schema)} {end}"

    if deepseek.FENCE in grammar.asked.source:
        return _Frame(fenced, before, r'"\n"', behind)
    return _Frame(bare, before, "", behind)


def _harmony(grammar: CallGrammar) -> _Frame:
    """Return the frame of gpt-oss. The model may reason first. A call ends the answer, so there is only one call."""
    channel, message, constrain = map(grammar.tag, (harmony.CHANNEL, harmony.MESSAGE, harmony.CONSTRAIN))
    thought = ""
    if grammar.asked.tokens.keys() >= {harmony.END, harmony.MESSAGE}:
        anything = grammar.rule("/(?s:.*)/")
        next_one = f'{grammar.tag(harmony.END)} {grammar.tag(harmony.START)} "assistant"'
        thought = f'({channel} "analysis" {message} {anything} {next_one})?'

    def call(g: CallGrammar, name: str, schema: Mapping[str, Any]) -> str:
        to = _literal(f"commentary to=functions.{_checked(name)} ")
        return f'{channel} {to} {constrain} "json" {message} {g.arguments(schema)}'

    return _Frame(call, has_several=False, thought=thought, answer=f'{channel} "final" {message}')


def _glm(grammar: CallGrammar) -> _Frame:
    line = r'"\n"?'

    def call(g: CallGrammar, name: str, schema: Mapping[str, Any]) -> str:
        parts = [g.tag(glm.OPEN), _named(name), line]
        for key, of_key, required in _properties(schema):
            tagged = f"{g.tag(glm.KEY)} {_literal(key)} {g.tag(glm.KEY_END)} {line} {g.tag(glm.VALUE)}"
            part = f"{tagged} {g.value(of_key, schema, '', glm.VALUE_END)} {line}"
            parts.append(part if required else f"({part})?")
        return " ".join([*parts, g.tag(glm.CLOSE)])

    def free(g: CallGrammar, name: str) -> str:
        return f"{g.tag(glm.OPEN)} {_named(name)} {g.text_until('', glm.CLOSE)}"

    return _Frame(call, between=line, free=free)


def _qwen_coder(grammar: CallGrammar) -> _Frame:
    def call(g: CallGrammar, name: str, schema: Mapping[str, Any]) -> str:
        parts = [g.tag(qwen_coder.OPEN), _literal(f"\n{qwen_coder.FUNCTION}{_checked(name)}>\n")]
        for key, of_key, required in _properties(schema):
            value = g.value(of_key, schema, "\n", qwen_coder.PARAMETER_END)
            part = f'{_literal(f"{qwen_coder.PARAMETER}{key}>" + chr(10))} {value} "\\n"'
            parts.append(part if required else f"({part})?")
        return " ".join([*parts, _literal(f"{qwen_coder.FUNCTION_END}\n"), g.tag(qwen_coder.CLOSE)])

    def free(g: CallGrammar, name: str) -> str:
        opening = _literal(f"\n{qwen_coder.FUNCTION}{_checked(name)}>\n")
        return f"{g.tag(qwen_coder.OPEN)} {opening} {g.text_until('', qwen_coder.CLOSE)}"

    return _Frame(call, between=r'"\n"', free=free)


def _pythonic(grammar: CallGrammar) -> _Frame:
    tags = [grammar.tag(tag) for tag in (pythonic.OPEN, pythonic.CLOSE)]
    opening, closing = tags if pythonic.OPEN in grammar.asked.source else ("", "")

    def call(g: CallGrammar, name: str, schema: Mapping[str, Any]) -> str:
        if pythonic.NAME.fullmatch(name) is None:
            raise Inexpressible
        first = further = ""
        for key, of_key, required in reversed([*_properties(schema)]):
            if not key.isidentifier():
                raise Inexpressible
            words = _PYTHON_WORDS.get(str(of_key.get("type"))) if "enum" not in of_key else None
            argument = f"{_literal(f'{key}=')} {g.rule(words) if words else g.json(_with_definitions(of_key, schema))}"
            # `first`: the remaining arguments if none was written yet. `further`: the same after a comma.
            first, further = (
                g.rule(f"{argument} {further}" + ("" if required else f" | ({first})" if first else " | ")),
                g.rule(f'", " {argument} {further}' + ("" if required else f" | ({further})" if further else " | ")),
            )
        return f'{_literal(f"{name}(")} {first} ")"'

    def free(g: CallGrammar, name: str) -> str:
        return f'{_literal(f"{name}(")} {g.rule("/(?s:.*)/")} ")"'

    return _Frame(call, f'{opening} "["', '", "', f'"]" {closing}', free=free)


_FRAMES: Mapping[str, Callable[[CallGrammar], _Frame]] = {
    "harmony": _harmony,
    "deepseek": _deepseek,
    "mistral": _mistral,
    "pythonic": _pythonic,
    "glm": _glm,
    "qwen_coder": _qwen_coder,
    "hermes": _hermes,
    "llama": _llama,
}


def _properties(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Yield each property in order: its name, its schema, and whether it is required. Raises: Inexpressible."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if schema.get("type") != "object" or schema.keys() - _OBJECT or not isinstance(properties, Mapping):
        raise Inexpressible
    if not isinstance(required, Sequence) or set(required) - properties.keys():
        raise Inexpressible
    for key, of_key in properties.items():
        if _KEY.fullmatch(key) is None or not isinstance(of_key, Mapping):
            raise Inexpressible
        yield key, of_key, key in required


def _with_definitions(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**{name: root[name] for name in _DEFINITIONS if name in root}, **schema}


def _checked(name: str) -> str:
    if NAME.fullmatch(name) is None:
        raise Inexpressible
    return name


def _named(name: str) -> str:
    return _literal(_checked(name))


def _in_slashes(pattern: str) -> str:
    """Return the regular expression with slashes and line breaks escaped, for use between slashes."""
    return re.sub(
        r"\\.|/|\n", lambda match: {"/": r"\/", "\n": r"\n"}.get(match[0], match[0]), pattern, flags=re.DOTALL
    )


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
