"""Helper process that compiles and renders chat templates in Jinja's sandbox, as transformers does.

A template is untrusted: it may loop forever or exhaust memory, so it runs in a process that can be killed. transformers
itself is not used, since it imports torch.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.process.helper import Buffer, answer_frames
from baton.router.model.template_traces import find_traces
from baton.text.structured.json_text import read_arguments

CPU_S = 2.0  # maximum CPU time of rendering one prompt
MEMORY_BYTES = 1 << 30  # maximum address space, in addition to that of the started process
REASON_CHARACTERS = 1000
TOO_LARGE = f"it takes more than {MEMORY_BYTES >> 20} MiB"
COMPILED = 4  # maximum number of cached templates
DONE, REFUSED = b"\0", b"\1"
"""First byte of an answer. The rendered text, or the reason of the rejection, follows."""


class TemplateRefused(Exception):
    """Error: the template does not compile, or rejects the messages. The text is usually the template's own."""


class CompiledTemplate:
    """Chat template compiled by Jinja. `special_tokens`: text of each token that has a name such as `bos_token`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile the template. Raises: TemplateRefused, MemoryError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
            """Variables that the template reads and does not set itself."""
        except MemoryError:
            raise
        except Exception as error:
            raise TemplateRefused(_reason(error)) from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Iterable[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        most_characters: int | None = None,
    ) -> str:
        """Render messages to a prompt of at most `most_characters`. Raises: TemplateRefused, MemoryError."""
        names = {
            **(options or {}),
            **self._special_tokens,
            "messages": [_with_arguments(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": list(tools) or None,
            "documents": None,
        }
        pieces, characters = list[str](), 0
        try:
            for piece in self._template.generate(names):
                characters += len(piece)
                if most_characters is not None and characters > most_characters:
                    raise TemplateRefused(f"the prompt would exceed {most_characters} characters")
                pieces.append(piece)
        except (MemoryError, TemplateRefused):
            raise
        except _Refusal as refusal:
            raise TemplateRefused(_reason(refusal)) from refusal
        except Exception as error:
            raise TemplateRefused("it does not support such messages, tools or options") from error
        return "".join(pieces)

    def attempt(self, messages: Iterable[Mapping[str, Any]]) -> str | None:
        """Render messages without tools and options; None if the template rejects them. Raises: MemoryError."""
        try:
            return self.render(messages)
        except TemplateRefused:
            return None


TRACES = b"traces"
"""Request for the parts of conversations that a template drops. It takes the place of a prompt's input."""


def _reason(error: Exception) -> str:
    """Return the text of an error that a template caused, cut to REASON_CHARACTERS."""
    return (str(error) or type(error).__name__)[:REASON_CHARACTERS]


def _with_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message with the arguments of tool calls as objects, as transformers gives them to templates."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _arguments(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _arguments(text: str) -> dict[str, Any] | str:
    """Parse the arguments of a tool call; return `text` itself if it is not a JSON object."""
    arguments = read_arguments(text.strip() or "{}")
    return text if arguments is None else arguments


class _GenerationBlock(Extension):
    """Jinja extension for `{% generation %}`, which marks assistant text for training; only its content is rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Serialise to JSON. HTML characters are not escaped, in contrast to Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _strftime_now(format: str) -> str:
    """Return the local time for templates that state a date (Llama 3, gpt-oss), as transformers does."""
    return datetime.now().astimezone().strftime(format)  # noqa: TID251 -- date in a prompt


class _Refusal(jinja2.TemplateError):
    """Error: the template rejects the messages by calling `raise_exception`."""


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


class _Renderer:
    """Answers requests of the router. A request is a template, a newline, and one of three endings: the input of a
    prompt, to render it; TRACES, to list the parts that the template drops; or nothing, to list its variables.
    """

    def __init__(self) -> None:
        self._compiled: dict[bytes, CompiledTemplate] = {}

    def answer(self, asked: memoryview) -> Sequence[Buffer]:
        setup, _, given = bytes(asked).partition(b"\n")
        try:
            template = self._template(setup)
            if given == TRACES:
                traces = find_traces(template.attempt)
                text = json.dumps([sorted(traces.drops), sorted(traces.refuses)])
            else:
                text = template.render(**json.loads(given)) if given else json.dumps(sorted(template.variables))
        except TemplateRefused as refused:
            return [REFUSED, str(refused).encode(errors="surrogatepass")]
        except MemoryError:  # the failed rendering has freed its memory, so the process continues
            return [REFUSED, TOO_LARGE.encode()]
        return [DONE, text.encode(errors="surrogatepass")]

    def _template(self, setup: bytes) -> CompiledTemplate:
        """Return the compiled template, from the cache or by compiling it. Raises: TemplateRefused."""
        found = self._compiled.get(setup)
        if found is None:
            if len(self._compiled) >= COMPILED:
                self._compiled.clear()
            found = self._compiled[setup] = CompiledTemplate(*json.loads(setup))
        return found


if __name__ == "__main__":
    # A client waits for its first token, so the process does not lower its priority (niceness 0).
    sys.exit(answer_frames(_Renderer().answer, niceness=0, cpu_s=float(sys.argv[1]), memory_bytes=MEMORY_BYTES))
