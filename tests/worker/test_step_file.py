"""The file of steps that benchmarks read."""

from pathlib import Path

from baton.engine.runner.thread import StepTiming
from baton.worker.step_file import StepFile


def test_each_step_is_a_whole_line_at_once_and_the_handler_gets_everything(tmp_path: Path) -> None:
    taken: list[object] = []
    steps = StepFile(tmp_path / "steps")
    handle = steps.recording(lambda outcomes, timing: taken.append((outcomes, timing)), len)
    outcomes = ["ab", "c"]
    timing = StepTiming(10.0, 10.25)
    handle(outcomes, timing)
    assert (tmp_path / "steps").read_text() == "10.000000 10.250000 3\n"
    assert taken == [(outcomes, timing)]
    steps.close()
