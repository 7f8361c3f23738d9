"""`baton completion`: the script that it prints makes a shell list our commands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton import IMPORT_PATH
from baton.cli.__main__ import app
from baton.launch.paths import ROOT


def script(shell: str) -> str:
    done = CliRunner().invoke(app, ["completion", shell])
    assert done.exit_code == 0, done.output
    return done.output


def completed(shell: str, line: str) -> str:
    """What the shell is told for this line, by the variables with which its script calls the command."""
    words = line.split(" ")
    environment = {
        **os.environ,
        "PYTHONPATH": str(IMPORT_PATH),
        "_BATON_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    command = [sys.executable, "-P", "-m", "baton.cli"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_lists_commands_and_flags(shell: str) -> None:
    commands = completed(shell, "baton ")
    assert all(name in commands for name in ("up", "chat", "status", "completion", "bench"))
    begun = completed(shell, "baton st")
    assert "status" in begun and "chat" not in begun
    assert "--watch" in completed(shell, "baton status --w")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_script_calls_the_clone(shell: str) -> None:
    assert "_BATON_COMPLETE" in script(shell)
    assert str(ROOT / "baton") in script(shell)


def test_completion_script_works_in_bash(tmp_path: Path) -> None:
    stub = tmp_path / "baton"
    stub.write_text(f'#!/bin/sh\nPYTHONPATH="{IMPORT_PATH}" exec "{sys.executable}" -P -m baton.cli "$@"\n')
    stub.chmod(0o755)
    lines = [
        script("bash"),
        f'COMP_WORDS=("{stub}" st); COMP_CWORD=1',
        f'"$(complete -p baton | sed "s/.*-F \\([^ ]*\\).*/\\1/")" "{stub}"',
        'printf "%s\\n" "${COMPREPLY[@]}"',
    ]
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("status\n", "")
