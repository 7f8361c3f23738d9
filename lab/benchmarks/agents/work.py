"""Work that scripted answers give an agent, and the check that each call took effect once.

The agent works in a folder with notes. With tools, in turn: run a command, read the notes, edit them. Without tools,
each answer edits the notes.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from baton.lab.benchmarks.agents.worker import SessionAnswers

PROMPT = "Run the commands."
RESTARTING = "RESTARTING"
"""Environment variable with the path of a file that exists while a killed process restarts."""
CALLS, NOTES = "calls.txt", "notes.txt"
_DONE = "Done."
_EDITING = "The notes change."  # begins each answer without tools

Call = tuple[str, Mapping[str, Any]]
"""Name of a tool, and arguments."""


class SessionWork(Protocol):
    """Work of an agent in `turns` turns."""

    def answers(self, folder: Path, turns: int, restarting: Path) -> SessionAnswers:
        """Return the script. Commands in it take as long as `restarting` exists."""

    def is_exact(self, folder: Path, turns: int) -> bool:
        """Return whether each call had its effect once: later edits find only the text of the edit before them."""

    def stdin(self, turns: int) -> str: ...


@dataclass(frozen=True, slots=True)
class ToolWork:
    """Work with tools.

    `run`: call for a command. `read`: call for a file. `edit`: call that replaces a text in a file.
    """

    run: Callable[[str], Call]
    read: Callable[[Path], Call]
    edit: Callable[[Path, str, str], Call]

    def answers(self, folder: Path, turns: int, restarting: Path) -> SessionAnswers:
        return SessionAnswers([*(_as_text(self._call(folder, n, restarting)) for n in range(turns)), _DONE])

    def is_exact(self, folder: Path, turns: int) -> bool:
        calls = folder / CALLS
        appended = calls.read_text().split() if calls.exists() else []
        is_edited = (folder / NOTES).read_text() == notes(turns // 3 * 3)
        return is_edited and appended == [str(n) for n in range(0, turns, 3)]

    def stdin(self, turns: int) -> str:
        return ""

    def _call(self, folder: Path, number: int, restarting: Path) -> Call:
        """Return the call of a turn. Results of commands differ in length."""
        match number % 3:
            case 0:
                return self.run(f"echo {number} >> {CALLS}; seq {25 * (number % 5)}; {waiting(str(restarting))}")
            case 1:
                return self.read(folder / NOTES)
            case _:
                return self.edit(folder / NOTES, notes(number - 2).strip(), notes(number + 1).strip())


class TextWork:
    """Work of Aider, which has no tools: it edits by blocks in the text and runs a command after each edit.

    Each line of its input is a message of the user.
    """

    COMMAND = f"echo done >> {CALLS}"

    def answers(self, folder: Path, turns: int, restarting: Path) -> SessionAnswers:
        return SessionAnswers([*map(_edit_block, range(turns)), _DONE], counted=_EDITING, within=PROMPT)

    def is_exact(self, folder: Path, turns: int) -> bool:
        calls = folder / CALLS
        return calls.exists() and calls.read_text() == "done\n" * turns and (folder / NOTES).read_text() == notes(turns)

    def stdin(self, turns: int) -> str:
        return f"{PROMPT}\n" * turns


def notes(number: int) -> str:
    """Return the content of the notes before turn `number`."""
    return f"notes of turn {number}\n"


def waiting(path: str) -> str:
    """Return a shell command that waits until a file is removed."""
    return f"while [ -e {path} ]; do sleep 0.2; done"


def _edit_block(number: int) -> str:
    old, new = notes(number), notes(number + 1)
    return f"{_EDITING}\n\n{NOTES}\n```\n<<<<<<< SEARCH\n{old}=======\n{new}>>>>>>> REPLACE\n```\n"


def _as_text(call: Call) -> str:
    name, arguments = call
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
