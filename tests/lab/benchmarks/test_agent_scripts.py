"""Scripts of agents' sessions, whether they were carried out exactly, and the chart of a session."""

import json
import subprocess
from pathlib import Path

import pytest

from baton.lab.benchmarks.agents.figures import MeasuredSession, MeasuredTurn
from baton.lab.benchmarks.agents.run import AgentFigures
from baton.lab.benchmarks.agents.tested import TESTED
from baton.lab.benchmarks.agents.work import NOTES, PROMPT, TextWork, ToolWork, notes
from baton.lab.report.picture import draw_lines

TURNS = 7
WORK = ToolWork(
    lambda command: ("run", {"command": command}),
    lambda path: ("read", {"path": str(path)}),
    lambda path, old, new: ("edit", {"path": str(path), "old": old, "new": new}),
)


def carry_out(folder: Path, text: str) -> None:
    """Run the command, or make the edit, of an answer with a tool call."""
    call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    match call["name"], call["arguments"]:
        case "run", {"command": command}:
            subprocess.run(command, shell=True, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        case "edit", {"path": path, "old": old, "new": new}:
            Path(path).write_text(Path(path).read_text().replace(old, new))


@pytest.mark.parametrize("numbers", [range(TURNS), [0, 1, 2, 3, 3, 4, 5, 6], [0, 1, 3, 4, 5, 6], [0, 1, 2, 4, 5, 6]])
def test_tool_work_is_exact_only_if_each_call_was_carried_out_once(tmp_path: Path, numbers: range | list[int]) -> None:
    (tmp_path / NOTES).write_text(notes(0))
    script = WORK.answers(tmp_path, TURNS, tmp_path / "restarting")
    for number in numbers:
        carry_out(tmp_path, script.text(number))

    assert WORK.is_exact(tmp_path, TURNS) == (list(numbers) == list(range(TURNS)))


def test_text_work_counts_earlier_answers_as_turns(tmp_path: Path) -> None:
    script = TextWork().answers(tmp_path, 2, tmp_path / "restarting")
    first = f"You edit files. {PROMPT}"

    assert [script.step(first), script.step(f"{first} {script.text(0)} {PROMPT}")] == [0, 1]
    assert script.step("Give a title.") is None
    assert script.text(1).count(notes(1)) == script.text(1).count(notes(2)) == 1


def test_text_work_is_exact_only_if_each_edit_was_made_once(tmp_path: Path) -> None:
    (tmp_path / NOTES).write_text(notes(2))
    for _ in range(2):
        subprocess.run(TextWork.COMMAND, shell=True, cwd=tmp_path, check=True)

    assert TextWork().is_exact(tmp_path, 2) and not TextWork().is_exact(tmp_path, 3)


def test_chart_of_a_session_has_a_point_per_turn() -> None:
    turns = [MeasuredTurn(step, 100, 96, 96, 5.0) for step in (None, 0, 1, 2)]
    figures = AgentFigures("claude", "1", 0, True, MeasuredSession(turns, 0, 1.0, 100))

    assert draw_lines(figures.chart).count("<circle") == 3


def test_session_is_good_with_the_repeated_share_that_its_agent_can_reach() -> None:
    session = MeasuredSession([MeasuredTurn(1, 100, 96, 96, 5.0)], 0, TESTED["aider"].repeats, 100)

    assert AgentFigures("aider", "1", 0, True, session).is_good
    assert not AgentFigures("claude", "1", 0, True, session).is_good
