"""Rendering of messages by the model's chat template, in helper processes that can be killed."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.process.errors import Unavailable
from baton.process.helper import Failure, Helper, HelperBusy, HelperFailed
from baton.router.admission.queue import RETRY_AFTER_S
from baton.router.model.defaults import ModelFolderError, read_json
from baton.router.model.template_process import CPU_S, DONE, TOO_LARGE, TRACES, TemplateRefused
from baton.router.model.template_traces import Traces, is_plain, shown
from baton.router.model.turns import Turns
from baton.router.types.request import Message
from baton.text.host.files import read_file, reading, reads
from baton.text.output.thoughts import thoughts_of

MODULE = "baton.router.model.template_process"
PROCESSES = 2  # number of helper processes; with one, a slow prompt would delay those of other callers
WALL_S = 20.0  # maximum wall time of rendering one prompt; CPU time is limited separately
MOST_ENDINGS = 64
"""Maximum number of remembered prompt endings. There is one for each combination of template options."""
ENDING_CHARACTERS = 256


class UnreadOption(Exception):
    """Error: an option in the request has no effect: the template does not read it, or the router sets it itself."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class ChatTemplate:
    """Chat template of the model, compiled and rendered in helper processes. Call `close` at the end."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_format: str = "", cpu_s: float = CPU_S
    ) -> None:
        """Compile the template. Blocks.

        `special_tokens`: text of each token that templates refer to by a name such as `bos_token`. `tool_format`:
        format of tool calls; empty: it is detected. `cpu_s`: maximum CPU time of rendering one prompt.
        Raises: ModelFolderError for a template that does not compile within the limits.
        """
        self.source = source
        self.tool_format = tool_format
        self._special_tokens = dict(special_tokens)
        self._setup = json.dumps([source, self._special_tokens]).encode() + b"\n"
        self._cpu_s = cpu_s
        self._helper = Helper(MODULE, str(cpu_s), processes=PROCESSES, limit_s=WALL_S)
        self._turns = Turns(PROCESSES)
        # gpt-oss's template calls the reasoning of a message "thinking"; all others call it "reasoning_content".
        self._thoughts = "thinking" if "message.thinking" in source else "reasoning_content"
        self._endings: dict[str, str] = {}  # prompt endings by template options
        self._traces: Traces | None = None  # None until a message needs them
        try:
            self.variables = frozenset[str](json.loads(_text(self._helper.ask_here([self._setup]))))
            """Variables that the template reads and does not set itself."""
        except (TemplateRefused, HelperFailed) as error:
            self.close()
            reason = self._excess(error.failure) if isinstance(error, HelperFailed) else str(error)
            raise ModelFolderError(f"the chat template does not compile: {reason}") from error

    def close(self) -> None:
        self._helper.close()

    def writes(self, token: str) -> bool:
        """Return whether the template contains the token's text, or could write it by a name such as `bos_token`."""
        return token in self.source or token in self._special_tokens.values()

    async def ending(self, options: Mapping[str, Any], add_generation_prompt: bool, tenant: str = "") -> str:
        """Return the last characters of a rendered prompt with one user message; empty if the template rejects it.

        Raises: Unavailable.
        """
        asked = json.dumps([add_generation_prompt, sorted(options.items())])
        known = self._endings.get(asked)
        if known is None:
            known = await self._ending(options, add_generation_prompt, tenant)
            if len(self._endings) >= MOST_ENDINGS:
                self._endings.clear()
            self._endings[asked] = known
        return known

    async def _ending(self, options: Mapping[str, Any], add_generation_prompt: bool, tenant: str) -> str:
        try:
            rendered = await self.render([Message("user", "?")], (), options, add_generation_prompt, tenant=tenant)
        except (TemplateRefused, UnreadOption):
            return ""
        return rendered[-ENDING_CHARACTERS:]

    async def shown(self, messages: Sequence[Message], tenant: str = "") -> Sequence[Message]:
        """Return the messages to render. Raises: NotShown if the template would silently drop a part of a message."""
        if all(map(is_plain, messages)):
            return messages
        if self._traces is None:
            try:
                async with self._turns.turn(tenant, len(self._setup)):
                    found = json.loads(_text(await self._helper.ask([self._setup, TRACES])))
                self._traces = Traces(*map(frozenset, found))
            except (HelperFailed, TemplateRefused) as error:
                if isinstance(error, HelperFailed) and not error.failure.is_of_question:
                    return messages
                self._traces = Traces()  # detection is too costly: assume that nothing is dropped
            except HelperBusy:
                return messages
        thinks = thoughts_of(self.source, "") is not None or "<|channel|>" in self.source
        return shown(messages, self._traces, self.source, thinks)

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        most_characters: int | None = None,
        tenant: str = "",
    ) -> str:
        """Render messages to a prompt. Raises: TemplateRefused, UnreadOption, Unavailable.

        `most_characters`: longer prompts are rejected. `tenant`: name of the caller, for fair turns.
        """
        for name in options or ():
            if name not in self.variables or name in self._special_tokens or name in _OWN_NAMES:
                raise UnreadOption(name)
        given = {
            "messages": [conversation_entry(message, self._thoughts) for message in messages],
            "tools": list(tools),
            "options": dict(options or {}),
            "add_generation_prompt": add_generation_prompt,
            "most_characters": most_characters,
        }
        asked = json.dumps(given, ensure_ascii=False).encode(errors="surrogatepass")
        try:
            async with self._turns.turn(tenant, len(asked)):
                return _text(await self._helper.ask([self._setup, asked]))
        except HelperFailed as error:
            if error.failure.is_of_question:
                raise TemplateRefused(self._excess(error.failure)) from error
            message = f"timed out after {WALL_S:g} s rendering the chat template; retry"
            raise Unavailable(message, "PROMPT_NOT_RENDERED", RETRY_AFTER_S) from error
        except HelperBusy:
            busy = "too many chats are being rendered; retry"
            raise Unavailable(busy, "PROMPT_NOT_RENDERED", RETRY_AFTER_S) from None

    def _excess(self, failure: Failure) -> str:
        match failure:
            case Failure.CPU:
                return f"it takes more than {self._cpu_s:g} s of CPU time"
            case Failure.MEMORY:
                return TOO_LARGE
            case Failure.CRASH:
                return "it crashes the process that renders it"
        return "the process that renders it does not answer"


_OWN_NAMES = ("messages", "add_generation_prompt", "tools", "documents")


def _text(answer: bytearray) -> str:
    """Return the text of a helper process's answer. Raises: TemplateRefused if the answer is a rejection."""
    text = answer[1:].decode(errors="surrogatepass")
    if answer[:1] != DONE:
        raise TemplateRefused(text)
    return text


def conversation_entry(message: Message, thoughts: str) -> dict[str, Any]:
    """Return a message as transformers gives it to templates, but with the arguments of tool calls as text.

    Absent fields are left out. `thoughts`: the template's name for the field with the reasoning.
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
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return entry


@reads(ModelFolderError, "tokenizer_config.json")
def read_chat_template(folder: Path, tool_format: str = "") -> ChatTemplate | None:
    """Read and compile the checkpoint's chat template; None if it has none. Blocks. Raises: ModelFolderError."""
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.exists() else {}
    path, source = _source(folder, config)
    if source is None:
        return None
    special_tokens = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }
    with reading(path, ModelFolderError):
        return ChatTemplate(source, special_tokens, tool_format)


def _source(folder: Path, config: Mapping[str, Any]) -> tuple[Path, str | None]:
    """Return the file that contains the template, and the template's source; source None without a template."""
    path = folder / "chat_template.jinja"
    if path.exists():
        with reading(path, ModelFolderError):
            return path, read_file(path).decode()
    stated = config.get("chat_template")
    if isinstance(stated, list):  # the checkpoint has several named templates
        named = {entry["name"]: entry["template"] for entry in stated}
        stated = named.get("default")
    return folder / "tokenizer_config.json", stated if isinstance(stated, str) else None
