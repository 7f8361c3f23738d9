"""The file of steps that benchmarks read."""

from pathlib import Path

from baton.engine.request import Drawn, FirstToken
from baton.engine.runner.step_records import StepRecord
from baton.engine.scheduler.sequences import PromptComputed, RequestFailed, TokenMade
from baton.worker.role import StepFile


def test_each_step_is_one_complete_line_and_the_handler_gets_all(tmp_path: Path) -> None:
    taken: list[object] = []
    steps = StepFile(tmp_path / "steps")
    handle = steps.recording(lambda outcomes, timing: taken.append((outcomes, timing)))
    first = tuple(FirstToken(choice, 7, 0.0, None) for choice in range(2))
    outcomes = [
        PromptComputed(1, 8, 0, ended=True, first=first),
        PromptComputed(2, 8, 0, ended=False),
        TokenMade(3, 0, 4, Drawn(7, 0.0), None, 0),
        RequestFailed(4),
    ]
    timing = StepRecord(10.0, 10.25)
    handle(outcomes, timing)
    assert (tmp_path / "steps").read_text() == "10.000000 10.250000 3\n"
    assert taken == [(outcomes, timing)]
    steps.close()
