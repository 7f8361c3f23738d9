"""`baton chat` without a question: what goes to the model, and what ends what."""

import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import pytest

import baton.cli.ask
from baton.cli.ask import HELP, INTERRUPTED, chat_loop
from baton.client import BatonClientError, Busy, Delta, Event, Finished, FinishReason, Message, Started, Timings, Usage

TIMINGS = Timings(40.4, 1040.4, 0, 0, 0, 0, 0, 0, 0, 0, 0, "shared_memory", 1, 2)
END = Finished(0, FinishReason.STOP, usage=Usage(96, 21, 64), timings=TIMINGS)
Script = Sequence[Sequence[Event | BaseException]]


class FakeClient:
    """Answers by a script, and keeps what each question went with."""

    def __init__(self, answers: Script) -> None:
        self._answers = list(answers)
        self.asked: list[list[tuple[str, str]]] = []
        self.closed = 0

    def __enter__(self) -> "FakeClient":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def chat(self, messages: Iterable[Message], **options: object) -> Generator[Event, None, None]:
        self.asked.append([(message.role, message.content) for message in messages])
        return self._events(self._answers.pop(0))

    def _events(self, answer: Sequence[Event | BaseException]) -> Generator[Event, None, None]:
        try:
            for each in answer:
                if isinstance(each, BaseException):
                    raise each
                yield each
        finally:
            self.closed += 1


Talk = Callable[..., tuple[FakeClient, int]]


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Runs a conversation over these lines, at a terminal or not; an exception among them comes out of input()."""

    def run(
        lines: Sequence[str | BaseException], answers: Script, terminal: bool = True, **more: Any
    ) -> tuple[FakeClient, int]:
        coming = iter([*lines, EOFError()])

        def read(prompt: str) -> str:
            line = next(coming)
            if isinstance(line, BaseException):
                raise line
            return line

        fake = FakeClient(answers)
        monkeypatch.setattr(baton.cli.ask, "BatonClient", lambda *_, **__: fake)
        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: terminal, raising=False)
        return fake, chat_loop("host:1", more.pop("system", None), {}, **more)

    return run


def said(text: str) -> list[Event]:
    return [Delta(0, 0, (1,), text), END]


def test_chat_question_is_sent_with_the_conversation(talk: Talk) -> None:
    fake, code = talk(["one", "", "two"], [said("1"), said("2")], system="Be brief")
    assert fake.asked == [
        [("system", "Be brief"), ("user", "one")],
        [("system", "Be brief"), ("user", "one"), ("assistant", "1"), ("user", "two")],
    ]
    assert code == 0


def test_chat_ctrl_c_cancels_the_answer_only(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    fake, code = talk(["one", "two"], [[Delta(0, 0, (1,), "half"), KeyboardInterrupt()], said("2")])
    assert fake.asked[1] == [("user", "one"), ("assistant", "half"), ("user", "two")]
    assert (fake.closed, code) == (2, 0)
    assert capsys.readouterr().err == "(cancelled)\n"


def test_chat_failed_answer_is_dropped_with_its_question(talk: Talk) -> None:
    fake, code = talk(["one", "two", "three"], [[Busy("no room")], [KeyboardInterrupt()], said("3")])
    assert fake.asked[2] == [("user", "three")]
    assert code == 0


def test_chat_ctrl_c_at_prompt_drops_the_line(talk: Talk) -> None:
    fake, code = talk([KeyboardInterrupt(), "one"], [said("1")])
    assert (len(fake.asked), code) == (1, 0)


def test_chat_reset_keeps_the_system_message(talk: Talk) -> None:
    fake, _ = talk(["one", "/reset", "two"], [said("1"), said("2")], system="Be brief")
    assert fake.asked[1] == [("system", "Be brief"), ("user", "two")]


@pytest.mark.parametrize("line", ["/help", "/unknown"])
def test_chat_command_prints_help_and_asks_nothing(talk: Talk, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    fake, _ = talk([line], [])
    assert fake.asked == []
    assert HELP in capsys.readouterr().out


def test_chat_path_is_a_question(talk: Talk) -> None:
    fake, _ = talk(["/etc/hosts is what?"], [said("a file")])
    assert fake.asked == [[("user", "/etc/hosts is what?")]]


@pytest.mark.parametrize("verbose", [False, True])
def test_chat_verbose_prints_timings(talk: Talk, verbose: bool, capsys: pytest.CaptureFixture[str]) -> None:
    started = Started("req-7f", "tiny", 3, 7)
    talk(["one", "two"], [[started, *said("1")], [started, *said("2")]], verbose=verbose)
    line = "TTFT 40 ms · 20.0 tokens/s · 21 tokens · 64 of 96 prompt tokens cached · req-7f\n"
    assert capsys.readouterr().err == line * 2 * verbose


def test_chat_pipe_lines_are_questions(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    _, code = talk(["one", "two"], [said("1"), said("2")], terminal=False)
    assert capsys.readouterr().out == "1\n2\n"
    assert code == 0


def test_chat_pipe_failure_sets_exit_code(talk: Talk) -> None:
    answers: list[list[Event | BaseException]] = [[Busy("no room")], list(said("2"))]
    fake, code = talk(["one", "two"], answers, terminal=False)
    assert (len(fake.asked), code) == (2, 1)
    assert isinstance(answers[0][0], BatonClientError)
    assert talk([KeyboardInterrupt()], [], terminal=False)[1] == INTERRUPTED
