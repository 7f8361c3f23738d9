"""`baton chat` without a question: a conversation, at the terminal or from the lines of standard input."""

import re
import sys

from cli.answer_output import TextOutput
from cli.ask import ask, opening
from cli.connection import credentials
from client import BatonClient, GenerateOptions, Message

HELP = """/reset   forget the conversation and begin anew
/help    show this
Ctrl-C   cancel the answer; the conversation goes on
Ctrl-D   end the conversation"""
INTERRUPTED = 130  # the status that shells give a command that Ctrl-C ended


def chat_loop(target: str, system: str | None, options: GenerateOptions, verbose: bool = False) -> int:
    """Until the end of input. The exit code is 1 where standard input is no terminal and an answer failed."""
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
                conversation.take(line)


class Conversation:
    """The messages so far; all of them go with each question."""

    def __init__(
        self, client: BatonClient, target: str, system: str | None, options: GenerateOptions, verbose: bool
    ) -> None:
        self._client = client
        self._target = target
        self._opening = opening(system)
        self._options = options
        self._verbose = verbose
        self.messages = list(self._opening)
        self.has_failed = False

    def take(self, line: str) -> None:
        """A command, or a question, whose answer is shown."""
        if line == "/reset":
            self.messages = list(self._opening)
            print("The conversation begins anew.")
        elif line == "/help":
            print(HELP)
        elif re.fullmatch(r"/\w+", line):
            print(f"There is no command {line}.\n{HELP}")
        else:
            self._ask([*self.messages, Message("user", line)])

    def _ask(self, messages: list[Message]) -> None:
        """A failed answer is forgotten with its question; a cancelled one is kept as far as it came."""
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
