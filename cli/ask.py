"""`baton generate` and `baton chat`: one question, or a conversation at the terminal."""

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing

from cli.answer_output import AnswerOutput, JsonOutput, TextOutput, show_answer
from cli.connection import credentials
from cli.failures import explained
from client import BatonClient, BatonClientError, Event, GenerateOptions, Message


def generate(target: str, prompt: str | Sequence[int], system: str | None, options: GenerateOptions, json: bool) -> int:
    """Continues a prompt. With `system` the prompt is a user's message, put through the model's chat template."""
    with BatonClient(target, **credentials()) as client:
        if system is not None and isinstance(prompt, str):
            messages = _conversation(system, prompt)
            return _show(lambda: client.chat(messages, **options), _output(options, json), target)
        return _show(lambda: client.generate(prompt, **options), _output(options, json), target)


def chat_once(target: str, message: str, system: str | None, options: GenerateOptions, json: bool) -> int:
    messages = _conversation(system, message)
    with BatonClient(target, **credentials()) as client:
        return _show(lambda: client.chat(messages, **options), _output(options, json), target)


def chat_loop(target: str, system: str | None, options: GenerateOptions) -> int:
    """Asks for messages until the end of input. Ctrl-C ends an answer, not the conversation."""
    import readline  # noqa: F401  line editing for input()

    history = [Message("system", system)] if system is not None else []
    prompt = "> " if sys.stdin.isatty() else ""
    with BatonClient(target, **credentials()) as client:
        if prompt:
            print("Ctrl-D ends the conversation.")
        while True:
            try:
                question = input(prompt).strip()
            except (EOFError, KeyboardInterrupt):
                print(end="\n" if prompt else "")
                return 0
            if question:
                history = _turn(client, [*history, Message("user", question)], options, target) or history


def _turn(client: BatonClient, messages: list[Message], options: GenerateOptions, target: str) -> list[Message] | None:
    """The conversation with its answer; None where there was none, so that the question is forgotten too."""
    output = TextOutput(choices=1)
    try:
        answered = _show(lambda: client.chat(messages, **options), output, target) == 0
    except KeyboardInterrupt:
        output.end()
        answered = bool(output.text)
    return [*messages, Message("assistant", output.text)] if answered else None


def _show(ask: Callable[[], Generator[Event, None, None]], output: AnswerOutput, target: str) -> int:
    """The exit code. A request that the client itself refuses is shown like one that the server refuses."""
    try:
        events = ask()
    except BatonClientError as error:
        output.fail(error)
        return 1
    with closing(events):
        return 0 if show_answer(explained(events, target), output) else 1


def _conversation(system: str | None, message: str) -> list[Message]:
    return [*([Message("system", system)] if system is not None else []), Message("user", message)]


def _output(options: GenerateOptions, json: bool) -> AnswerOutput:
    return JsonOutput() if json else TextOutput(options.get("n", 1))
