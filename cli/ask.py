"""Ask one question, or hold a conversation, as text or JSON (`baton generate`, `baton chat`)."""

import json
import re
import secrets
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Protocol, TextIO

from baton.cli.connection import credentials, explained
from baton.client import (
    BatonClient,
    BatonClientError,
    Delta,
    Event,
    Finished,
    GenerateOptions,
    InvalidRequest,
    Message,
    PromptPart,
    Started,
    Timings,
    Usage,
)
from baton.process.foreign_text import shown

DECIMALS = 3
_NAMES: dict[type[Event], str] = {Started: "started", PromptPart: "prompt", Delta: "delta"}


def round_ms(value: float) -> float:
    return round(value, DECIMALS)


def round_milliseconds(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the fields with rounded milliseconds: the values of fields whose names end with `_ms`."""
    return {
        name: round_ms(value) if name.endswith("_ms") and isinstance(value, float) else value
        for name, value in fields.items()
    }


class AnswerOutput(Protocol):
    def show(self, event: Event) -> None: ...
    def end(self) -> None: ...
    def fail(self, error: BatonClientError) -> None: ...


class TextOutput:
    """Text output. A single choice is printed while it arrives; of several choices, each is printed when complete."""

    def __init__(self, choices: int, output: TextIO | None = None, errors: TextIO | None = None) -> None:
        self._output = output or sys.stdout
        self._errors = errors or sys.stderr
        self._at_terminal = self._output.isatty()
        self._texts: dict[int, list[str]] | None = {} if choices > 1 else None
        self._prompt = ""  # echoed prompt, printed before each choice
        self.text = ""

    def show(self, event: Event) -> None:
        if isinstance(event, PromptPart):
            if self._texts is None:
                self._write(event.text)
            self._prompt += event.text
        elif isinstance(event, Delta):
            if self._texts is None:
                self.text += event.text
                self._write(event.text)
                self._output.flush()
            else:
                self._texts.setdefault(event.index, []).append(event.text)
        elif isinstance(event, Finished) and self._texts is not None:
            self._write(f"[{event.index}] {self._prompt}{''.join(self._texts.get(event.index, []))}\n")
            self._output.flush()

    def _write(self, text: str) -> None:
        """Write a text; escape control characters if the output is a terminal."""
        self._output.write(shown(text, keeps="\n\t") if self._at_terminal else text)

    def end(self) -> None:
        if self._texts is None:
            self._output.write("\n")
            self._output.flush()

    def fail(self, error: BatonClientError) -> None:
        if self.text:
            self.end()
        field = error.field if isinstance(error, InvalidRequest) else None
        # Errors of the server already begin with the field.
        prefix = f"{field}: " if field and not error.message.startswith(field) else ""
        self._errors.write(f"baton: {error.code.name}: {prefix}{shown(error.message, keeps=chr(10))}\n")


class JsonOutput:
    """JSON output: one object per line, whose `event` is started, prompt, delta, finished or error."""

    def __init__(self, output: TextIO | None = None, errors: TextIO | None = None) -> None:
        self._output = output or sys.stdout
        self._errors = errors or sys.stderr

    def show(self, event: Event) -> None:
        self._write(event_as_object(event))

    def end(self) -> None:
        """Do nothing: `JsonOutput` writes each line immediately."""

    def fail(self, error: BatonClientError) -> None:
        field = error.field if isinstance(error, InvalidRequest) else None
        self._write(
            {
                "event": "error",
                "code": error.code.name,
                "message": error.message,
                "field": field,
                "reason": error.reason,
            }
        )
        self._errors.write(f"baton: {error.code.name}: {error.message}\n")

    def _write(self, content: dict[str, object]) -> None:
        self._output.write(json.dumps(content, ensure_ascii=False) + "\n")
        self._output.flush()


def event_as_object(event: Event) -> dict[str, object]:
    """Return an event as a JSON object. The last `finished` has usage and timings. `logprobs` are omitted if None."""
    if not isinstance(event, Finished):
        content = {"event": _NAMES[type(event)], **asdict(event)}
        content.pop("resume_token", None)  # secret: with it, anyone can resume the stream
        if content.get("logprobs", ()) is None:
            del content["logprobs"]
        return content
    content = {
        "event": "finished",
        "index": event.index,
        "finish_reason": event.reason.value,
        "matched_stop": event.matched_stop,
    }
    if event.usage is not None:
        content["usage"] = asdict(event.usage)
    if event.timings is not None:
        content["timings"] = round_milliseconds(asdict(event.timings))
    return content


def show_answer(events: Iterable[Event], output: AnswerOutput, timing: TextIO | None = None) -> bool:
    """Print an answer and return whether it succeeded. `timing`: file for a line with TTFT and token counts."""
    last: Event | None = None
    request_id = ""
    try:
        for event in events:
            output.show(event)
            last = event
            request_id = event.request_id if isinstance(event, Started) else request_id
    except BatonClientError as error:
        output.fail(error)
        return False
    output.end()
    if timing is not None and isinstance(last, Finished) and last.usage is not None and last.timings is not None:
        timing.write(f"{timing_line(last.usage, last.timings)} · {request_id}\n")
    return True


def timing_line(usage: Usage, timings: Timings) -> str:
    """Format TTFT, token rate after the first token, and token counts."""
    parts = [f"TTFT {timings.ttft_ms:.0f} ms"]
    decoding_ms = timings.total_ms - timings.ttft_ms
    if usage.completion_tokens > 1 and decoding_ms >= 1:
        parts.append(f"{(usage.completion_tokens - 1) * 1e3 / decoding_ms:.1f} tokens/s")
    parts.append(f"{usage.completion_tokens} tokens")
    parts.append(f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached")
    return " · ".join(parts)


def generate(
    target: str,
    prompt: str | Sequence[int],
    system: str | None,
    options: GenerateOptions,
    json: bool,
    verbose: bool = False,
) -> int:
    """Print the continuation of a prompt; return the exit code. `system`: use the chat template, with this message."""
    if system is not None and isinstance(prompt, str):
        return chat_once(target, prompt, system, options, json, verbose)
    with BatonClient(target, **credentials()) as client:
        return ask(lambda: client.generate(prompt, **options), _output(options, json), target, verbose)


def chat_once(
    target: str, message: str, system: str | None, options: GenerateOptions, json: bool, verbose: bool = False
) -> int:
    messages = [*opening(system), Message("user", message)]
    with BatonClient(target, **credentials()) as client:
        return ask(lambda: client.chat(messages, **options), _output(options, json), target, verbose)


def opening(system: str | None) -> list[Message]:
    """Return the messages before the first question: the system message, if there is one."""
    return [] if system is None else [Message("system", system)]


def ask(call: Callable[[], Generator[Event, None, None]], output: AnswerOutput, target: str, verbose: bool) -> int:
    """Print the answer; return the exit code. `verbose`: print TTFT and token counts on stderr."""
    try:
        events = call()
    except BatonClientError as error:
        output.fail(error)
        return 1
    with closing(events):
        return 0 if show_answer(explained(events, target), output, sys.stderr if verbose else None) else 1


def _output(options: GenerateOptions, json: bool) -> AnswerOutput:
    return JsonOutput() if json else TextOutput(options.get("n", 1))


HELP = """/reset   forget the conversation
/help    show this
Ctrl-C   cancel the answer; the conversation continues
Ctrl-D   end the conversation"""
INTERRUPTED = 130  # exit code that shells use after Ctrl-C


def chat_loop(target: str, system: str | None, options: GenerateOptions, verbose: bool = False) -> int:
    """Converse until the end of input; return 1 if an answer failed and standard input is no terminal."""
    import readline  # noqa: F401  line editing for input()

    at_terminal = sys.stdin.isatty()
    if at_terminal:
        print("/help lists the commands; Ctrl-D ends the conversation.")
    with BatonClient(target, **credentials()) as client:
        conversation = Conversation(client, target, system, options, verbose)
        while True:
            try:
                line = input("> " if at_terminal else "").strip()
            except EOFError:
                print(end="\n" if at_terminal else "")
                return 1 if conversation.has_failed and not at_terminal else 0
            except KeyboardInterrupt:
                if not at_terminal:
                    return INTERRUPTED
                print()
                continue
            if line:
                conversation.handle(line)


class Conversation:
    """Conversation that sends each question with all earlier turns, in a new session if none is given."""

    def __init__(
        self, client: BatonClient, target: str, system: str | None, options: GenerateOptions, verbose: bool
    ) -> None:
        self._client = client
        self._target = target
        self._opening = opening(system)
        self._options = options if "session_id" in options else options | {"session_id": secrets.token_hex(8)}
        self._verbose = verbose
        self.messages = list(self._opening)
        self.has_failed = False

    def handle(self, line: str) -> None:
        """Handle a line from the user: a command such as /help, or a question."""
        if line == "/reset":
            self.messages = list(self._opening)
            print("The conversation is reset.")
        elif line == "/help":
            print(HELP)
        elif re.fullmatch(r"/\w+", line):
            print(f"Unknown command {line}.\n{HELP}")
        else:
            self._ask([*self.messages, Message("user", line)])

    def _ask(self, messages: list[Message]) -> None:
        """Ask a question. Keep its answer, or the received text of a cancelled answer, but nothing of a failed one."""
        output = TextOutput(choices=1)
        try:
            is_answered = (
                ask(lambda: self._client.chat(messages, **self._options), output, self._target, self._verbose) == 0
            )
            self.has_failed |= not is_answered
        except KeyboardInterrupt:
            output.end()
            print("(cancelled)", file=sys.stderr)
            is_answered = bool(output.text)
        if is_answered:
            self.messages = [*messages, Message("assistant", output.text)]
