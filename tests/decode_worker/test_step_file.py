"""The file of steps that benchmarks read."""

from pathlib import Path

from decode_worker.step_file import StepFile
from engine.engine_thread import StepTiming
from engine.mixed_state import MixedOutcome, PromptComputed, TokenMade
from engine.plan import Drawn


def made(request_id: int) -> TokenMade:
    return TokenMade(request_id, 0, 3, Drawn(17, -0.5, ()), None, 0)


def test_each_step_is_a_whole_line_at_once_and_the_handler_gets_everything(tmp_path: Path) -> None:
    taken: list[object] = []
    steps = StepFile(tmp_path / "steps")
    handle = steps.recording(lambda outcomes, timing: taken.append((outcomes, timing)))
    outcomes: list[MixedOutcome] = [made(1), PromptComputed(2, 16, 0, ended=False), made(3)]
    timing = StepTiming(10.0, 10.25)
    handle(outcomes, timing)
    assert (tmp_path / "steps").read_text() == "10.000000 10.250000 2\n"
    assert taken == [(outcomes, timing)]
    steps.close()
