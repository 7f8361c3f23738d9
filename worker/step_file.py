"""When every step began and ended, for measurements of this worker from outside: a line per step."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from baton.engine.runner.thread import StepTiming

Outcome = TypeVar("Outcome")


class StepFile:
    """Appends `started ended tokens` to a file: seconds on the machine's monotonic clock, tokens of answers."""

    def __init__(self, path: Path) -> None:
        """Raises: OSError where it cannot be written."""
        self._lines = path.open("a", buffering=1)  # a reader finds whole lines

    def recording(
        self, handler: Callable[[Sequence[Outcome], StepTiming], None], tokens: Callable[[Outcome], int]
    ) -> Callable[[Sequence[Outcome], StepTiming], None]:
        """`tokens`: how many of answers an outcome made."""

        def handle(outcomes: Sequence[Outcome], timing: StepTiming) -> None:
            self._lines.write(f"{timing.started:.6f} {timing.ended:.6f} {sum(map(tokens, outcomes))}\n")
            handler(outcomes, timing)

        return handle

    def close(self) -> None:
        self._lines.close()
