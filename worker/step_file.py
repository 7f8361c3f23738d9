"""When every step began and ended, for measurements of this worker from outside: a line per step."""

from collections.abc import Sequence
from pathlib import Path

from baton.engine.runner.loop import OutcomeHandler
from baton.engine.runner.thread import StepTiming
from baton.engine.scheduler.sequences import PromptComputed, SchedulerOutcome, TokenMade


class StepFile:
    """Appends `started ended tokens` to a file: seconds on the machine's monotonic clock, tokens of answers."""

    def __init__(self, path: Path) -> None:
        """Raises: OSError where it cannot be written."""
        self._lines = path.open("a", buffering=1)  # a reader finds whole lines

    def recording(self, handler: OutcomeHandler) -> OutcomeHandler:
        def handle(outcomes: Sequence[SchedulerOutcome], timing: StepTiming) -> None:
            tokens = sum(map(_tokens_made, outcomes))
            self._lines.write(f"{timing.started:.6f} {timing.ended:.6f} {tokens}\n")
            handler(outcomes, timing)

        return handle

    def close(self) -> None:
        self._lines.close()


def _tokens_made(outcome: SchedulerOutcome) -> int:
    """Of answers."""
    if isinstance(outcome, PromptComputed):
        return len(outcome.first or ())
    return isinstance(outcome, TokenMade)
