"""Rendering of messages by the model's chat template, in helper processes that can be killed."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from baton.process.errors import Unavailable
from baton.process.helper import Failure, Helper, HelperBusy, HelperFailed
from baton.router.admission.queue import RETRY_AFTER_S
from baton.router.model.defaults import ModelFolderError
from baton.router.model.template_process import CPU_S, DONE, TOO_LARGE, TRACES, TemplateRefused
from baton.router.model.template_traces import Traces, is_plain, is_plain_sequence, shown
from baton.router.model.turns import Turns
from baton.router.types.request import Message
from baton.text.output.thoughts import thoughts_of
from baton.text.tokenizer.checkpoint_tokenizer import DEFAULT, WITH_TOOLS, CheckpointTokenizer

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
        self,
        source: str,
        special_tokens: Mapping[str, str],
        tool_format: str = "",
        cpu_s: float = CPU_S,
        with_tools: str | None = None,
    ) -> None:
        """Compile the template. Blocks.

        `special_tokens`: text of each token that templates refer to by a name such as `bos_token`. `tool_format`:
        format of tool calls; empty: it is detected. `cpu_s`: maximum CPU time of rendering one prompt. `with_tools`:
        source of the template for requests with tools; None: the same.
        Raises: ModelFolderError for a template that does not compile within the limits.
        """
        self.source = source if with_tools is None else f"{source}\n{with_tools}"
        """Sources of all templates. They are searched for marks of reasoning and tool calls."""
        self.tool_format = tool_format
        self._special_tokens = dict(special_tokens)
        self._setups = [
            json.dumps([each, self._special_tokens]).encode() + b"\n"
            for each in (source, source if with_tools is None else with_tools)
        ]
        self._cpu_s = cpu_s
        self._helper = Helper(MODULE, str(cpu_s), processes=PROCESSES, limit_s=WALL_S)
        self._turns = Turns(PROCESSES)
        self._endings: dict[str, str] = {}  # prompt endings by template options
        self._traces: dict[bytes, Traces] = {}  # by setup; absent until a message needs them
        try:
            read = [json.loads(_text(self._helper.ask_here([setup]))) for setup in dict.fromkeys(self._setups)]
            self.variables = frozenset[str]().union(*read)
            """Variables that a template reads and does not set itself."""
        except (TemplateRefused, HelperFailed) as error:
            self.close()
            reason = self._excess(error.failure) if isinstance(error, HelperFailed) else str(error)
            raise ModelFolderError(f"the chat template does not compile: {reason}") from error

    def close(self) -> None:
        self._helper.close()

    @property
    def shows_tools(self) -> bool:
        """Whether the template shows tools to the model. If not, the generic format does (generic_tools.py)."""
        return "tools" in self.variables

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

    async def shown(
        self, messages: Sequence[Message], tenant: str = "", *, has_tools: bool = False
    ) -> Sequence[Message]:
        """Return the messages to render. Raises: NotShown if the template would silently drop a part of a message."""
        if all(map(is_plain, messages)) and is_plain_sequence(messages):
            return messages
        setup = self._setups[has_tools]
        if setup not in self._traces:
            try:
                async with self._turns.turn(tenant, len(setup)):
                    found = json.loads(_text(await self._helper.ask([setup, TRACES])))
                self._traces[setup] = Traces(*map(frozenset, found))
            except (HelperFailed, TemplateRefused) as error:
                if isinstance(error, HelperFailed) and not error.failure.is_of_question:
                    return messages
                self._traces[setup] = Traces()  # detection is too costly: assume that nothing is dropped
            except HelperBusy:
                return messages
        thinks = thoughts_of(self.source, "") is not None or "<|channel|>" in self.source
        return shown(messages, self._traces[setup], self.source, thinks)

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
            "messages": [conversation_entry(message) for message in messages],
            "tools": list(tools),
            "options": dict(options or {}),
            "add_generation_prompt": add_generation_prompt,
            "most_characters": most_characters,
        }
        asked = json.dumps(given, ensure_ascii=False).encode(errors="surrogatepass")
        try:
            async with self._turns.turn(tenant, len(asked)):
                return _text(await self._helper.ask([self._setups[bool(tools)], asked]))
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


def conversation_entry(message: Message) -> dict[str, Any]:
    """Return a message as transformers gives it to templates, but with the arguments of tool calls as text.

    Absent fields are left out. Reasoning has two names: gpt-oss's template reads "thinking".
    """
    entry: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        entry = {"thinking": message.reasoning, **entry, "reasoning_content": message.reasoning}
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


def up_to_text(rendered: str, text: str) -> str:
    """Return a prompt up to the end of its last message's text. Raises: TemplateRefused if the prompt does not show it.

    As in transformers: templates may strip white space around the text.
    """
    at = rendered.rfind(text.strip())
    if at < 0:
        raise TemplateRefused("the last message cannot be continued: the template shows it in another form")
    begun = text.lstrip()
    return rendered[:at] + (begun if rendered.startswith(begun, at) else text.strip())


def chat_template_of(tokenizer: CheckpointTokenizer, tool_format: str = "") -> ChatTemplate | None:
    """Compile the checkpoint's chat template; None if it has none. Blocks. Raises: ModelFolderError.

    Of several templates, transformers takes those named `default` and, for requests with tools, `tool_use`.
    """
    named = tokenizer.templates
    if not named:
        return None
    lacking = f"the checkpoint has no chat template named {DEFAULT}, but {', '.join(sorted(named))}"
    source = named.get(DEFAULT, f"{{{{ raise_exception({json.dumps(lacking)}) }}}}")
    return ChatTemplate(source, tokenizer.special_tokens, tool_format, with_tools=named.get(WITH_TOOLS))
