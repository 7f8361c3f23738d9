"""`baton generate` and `baton chat`: one question and its answer."""

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing

from cli.answer_output import AnswerOutput, JsonOutput, TextOutput, show_answer
from cli.connection import credentials
from cli.failures import explained
from cli.http_probe import grpc_port_of
from client import BatonClient, BatonClientError, Event, GenerateOptions, Message


def generate(
    target: str,
    prompt: str | Sequence[int],
    system: str | None,
    options: GenerateOptions,
    json: bool,
    verbose: bool = False,
) -> int:
    """Continues a prompt. With `system` the prompt is a user's message, put through the model's chat template."""
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
    """The first messages of a conversation."""
    return [] if system is None else [Message("system", system)]


def ask(call: Callable[[], Generator[Event, None, None]], output: AnswerOutput, target: str, verbose: bool) -> int:
    """Shows the answer, and with `verbose` a line of figures on stderr; returns the exit code.

    A request that the client itself refuses is shown like one that the server refuses.
    """
    try:
        events = call()
    except BatonClientError as error:
        output.fail(error)
        return 1
    with closing(events):
        said = explained(events, target, lambda target: grpc_port_of(target, credentials()))
        return 0 if show_answer(said, output, sys.stderr if verbose else None) else 1


def _output(options: GenerateOptions, json: bool) -> AnswerOutput:
    return JsonOutput() if json else TextOutput(options.get("n", 1))
