"""What commands print of other people's names and of a model's answer cannot steer the terminal."""

import io

import pytest

from baton.cli import ask
from baton.cli.top.screen import _screen
from baton.cli.why import show
from baton.client import Delta
from baton.process.foreign_text import shown

ODD, SHOWN = "id\x1b[2J\u2028b", "id\\x1b[2J\\u2028b"


def test_why_prints_control_characters_as_escapes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show, "first_that_knows", lambda *_: None)
    monkeypatch.setattr(show, "lines", lambda found: ["request", ODD])
    assert show.show_why("r", ["h:1"], False) == 0
    assert capsys.readouterr().out == f"request\n{SHOWN}\n"


def test_top_shows_control_characters_as_escapes() -> None:
    assert _screen([ODD], None).lines == [SHOWN]


@pytest.mark.parametrize("at_terminal", [True, False])
def test_answer_is_escaped_on_a_terminal_and_exact_in_a_pipe(
    at_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.StringIO()
    monkeypatch.setattr(output, "isatty", lambda: at_terminal)
    text = ask.TextOutput(1, output)
    text.show(Delta(0, 0, (1,), "a\tb\n\x1b]0;x\x07", ()))
    assert output.getvalue() == ("a\tb\n\\x1b]0;x\\x07" if at_terminal else "a\tb\n\x1b]0;x\x07")


def test_shown_text_keeps_joined_emoji_and_other_scripts() -> None:
    assert shown("\U0001f468\u200d\U0001f469 שלום") == "\U0001f468\u200d\U0001f469 שלום"
