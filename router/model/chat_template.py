"""Messages to the text of a prompt, by the model's own Jinja template in a sandbox, as transformers renders them.

transformers itself is not used: importing it imports torch, which a router must not carry.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.router.model.defaults import ModelFolderError, read_json
from baton.router.types.request import Message

MOST_ENDINGS = 64
"""That are remembered: of so many combinations of options."""
ENDING_CHARACTERS = 256


class TemplateRefused(Exception):
    """The template does not take these messages; the text is the reason, in its author's words."""


class UnreadOption(Exception):
    """An option would change nothing: the template does not read it, or has it from the request itself."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class ChatTemplate:
    """`special_tokens` are names such as `bos_token` that templates refer to."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_format: str = "") -> None:
        """`tool_format`: how the model writes calls of functions, where the source is not to say.

        Raises: ModelFolderError for a template that does not compile.
        """
        self.source = source
        self.tool_format = tool_format
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
            """Names that it reads and does not set itself."""
        except jinja2.TemplateError as error:
            raise ModelFolderError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._thoughts = (
            "thinking" if "message.thinking" in source else "reasoning_content"
        )  # gpt-oss's name, or all others'
        self._endings: dict[tuple[Any, ...], str] = {}  # by options

    def writes(self, token: str) -> bool:
        """Whether the template has it word for word, or may have it by its name."""
        return token in self.source or token in self._special_tokens.values()

    def ending(self, options: Mapping[str, Any], add_generation_prompt: bool) -> str:
        """The last characters of a prompt of one question; empty where the template refuses that."""
        asked = (add_generation_prompt, *sorted(options.items(), key=lambda option: option[0]))
        known = self._endings.get(asked)
        if known is None:
            if len(self._endings) >= MOST_ENDINGS:
                self._endings.clear()
            known = self._endings[asked] = self._ending(options, add_generation_prompt)
        return known

    def _ending(self, options: Mapping[str, Any], add_generation_prompt: bool) -> str:
        try:
            rendered = self.render([Message("user", "?")], (), options, add_generation_prompt)
        except (TemplateRefused, UnreadOption):
            return ""
        return rendered[-ENDING_CHARACTERS:]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt, up to where the assistant begins if that is wanted. Raises: TemplateRefused, UnreadOption."""
        names = {
            **self._special_tokens,
            "messages": [_conversation_entry(message, self._thoughts) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": list(tools) or None,
            "documents": None,
        }
        for name in options or ():
            if name not in self.variables or name in names:
                raise UnreadOption(name)
        try:
            return self._template.render({**(options or {}), **names})
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise TemplateRefused(str(error)) from error


def _conversation_entry(message: Message, thoughts: str) -> dict[str, Any]:
    """As transformers gives it to templates: arguments of calls are objects, and what is absent is not there.

    `thoughts`: by what name the template reads them.
    """
    entry: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        entry[thoughts] = message.reasoning
    if message.name:
        entry["name"] = message.name
    if message.tool_call_id:
        entry["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        entry["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return entry


def _arguments(text: str) -> Any:
    """The object that the text is, or the text itself: a model's text need not be JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_chat_template(folder: Path, tool_format: str = "") -> ChatTemplate | None:
    """The checkpoint's template, None if it has none. Raises: ModelFolderError."""
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.exists() else {}
    source = _source(folder, config)
    if source is None:
        return None
    special_tokens = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }
    return ChatTemplate(source, special_tokens, tool_format)


def _source(folder: Path, config: Mapping[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").exists():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    stated = config.get("chat_template")
    if isinstance(stated, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in stated}
        stated = named.get("default")
    return stated if isinstance(stated, str) else None


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here it renders what is inside."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _strftime_now(format: str) -> str:
    """The date of a prompt, which templates of Llama 3 and gpt-oss state: local time, as transformers has it."""
    return datetime.now().astimezone().strftime(format)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
