"""Lines of a run at a terminal, and the groups of `--help`."""

import re

import pytest
from typer.testing import CliRunner

from baton.cli.__main__ import app
from baton.launch.processes import shortened

LINE = "router    | 14:44:47.410 {} router baton.router.process: {} trace_id=0af7 request_id=req-1"


def test_shortened_line_has_the_time_the_process_and_the_message() -> None:
    line = LINE.format("INFO", "ready")
    assert shortened(line, 80, colours=False) == "14:44:47 router    ready"


def test_shortened_line_fits_the_terminal_unless_it_warns() -> None:
    long = "word " * 40
    assert len(shortened(LINE.format("INFO", long), 80, colours=False)) == 80
    assert long.strip() in shortened(LINE.format("WARNING", long), 80, colours=False)


def test_shortened_line_colours_warnings_and_errors() -> None:
    assert "\x1b[33mslow\x1b[0m" in shortened(LINE.format("WARNING", "slow"), 80, colours=True)
    assert "\x1b[31mlost\x1b[0m" in shortened(LINE.format("ERROR", "lost"), 80, colours=True)


@pytest.mark.parametrize("line", ["baton     | ready in 3.0 s", "redis     | 1:M * Ready", ""])
def test_line_of_another_form_is_not_changed(line: str) -> None:
    assert shortened(line, 20, colours=True) == line


@pytest.mark.parametrize("command", [(), ("up",)])
def test_help_puts_every_command_and_flag_below_a_title(command: tuple[str, ...]) -> None:
    text = CliRunner().invoke(app, [*command, "--help"]).output
    titles = re.findall(r"╭─ (.+?) ─", text)
    assert len(titles) >= 6
    own = text.split("╭─ Options ")[1].split("╰")[0]
    assert [line for line in own.splitlines()[1:] if re.match(r"│ (--)?\w", line)] == [
        line for line in own.splitlines()[1:] if "--help" in line
    ]
