"""When every step began and ended, for whoever measures this worker from outside: a line per step."""

from collections.abc import Sequence
from pathlib import Path

from decode_worker.loop import OutcomeHandler
from engine.engine_thread import StepTiming
from engine.mixed_state import MixedOutcome, TokenMade


class StepFile:
    """Appends `started ended tokens` to a file: seconds on the machine's monotonic clock, tokens of answers."""

    def __init__(self, path: Path) -> None:
        """Raises: OSError where it cannot be written."""
        self._lines = path.open("a", buffering=1)  # a reader finds whole lines

    def recording(self, handler: OutcomeHandler) -> OutcomeHandler:
        def handle(outcomes: Sequence[MixedOutcome], timing: StepTiming) -> None:
            tokens = sum(isinstance(outcome, TokenMade) for outcome in outcomes)
            self._lines.write(f"{timing.started:.6f} {timing.ended:.6f} {tokens}\n")
            handler(outcomes, timing)

        return handle

    def close(self) -> None:
        self._lines.close()
