"""Runs a worker that writes down when each stage of a hand-over began and ended.

    python -m baton.lab.benchmarks.transfer.marked_worker prefill|decode FILE [flags of the worker ...]

FILE gets one JSON line per stage: its name, begin and end in seconds of time.monotonic, which is the same clock in all
processes of a Linux machine.
"""

import functools
import inspect
import json
import runpy
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO


@dataclass(frozen=True, slots=True)
class StageMarks:
    """File of stages that a worker wrote."""

    path: Path

    def since(self, moment: float) -> list[tuple[str, float, float]]:
        """Return (name, begin, end) of each stage that began at `moment` or later."""
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [(name, begin, end) for name, begin, end in lines if begin >= moment]


def marked(name: str, method: Callable[..., Any], marks: TextIO) -> Callable[..., Any]:
    """Wrap `method` so that begin and end of each call are written to `marks`. Calls that return False are left out."""

    def write(began: float, result: object) -> None:
        if result is not False:
            marks.write(json.dumps([name, began, time.monotonic()]) + "\n")

    @functools.wraps(method)
    def plain(*arguments: Any, **named: Any) -> Any:
        began = time.monotonic()
        result = method(*arguments, **named)
        write(began, result)
        return result

    @functools.wraps(method)
    async def coroutine(*arguments: Any, **named: Any) -> Any:
        began = time.monotonic()
        result = await method(*arguments, **named)
        write(began, result)
        return result

    return coroutine if inspect.iscoroutinefunction(method) else plain


def mark_stages(file: Path) -> None:
    """Patch the methods that are stages of a hand-over, so that begin and end of each call are written to `file`."""
    from baton.engine.runner.loop import EngineLoop
    from baton.engine.runner.thread import EngineThread
    from baton.worker.transfer.reader import TransferReader
    from baton.worker.transfer.source import TransferSource

    stages: dict[str, tuple[Any, str]] = {
        "step": (EngineThread, "_step"),
        "advance": (TransferSource, "advance"),
        "copy": (TransferReader, "_copy_new"),
        "confirm": (TransferReader, "_confirm"),
        "activate": (EngineLoop, "activate"),
    }
    marks = file.open("a", buffering=1)  # open until the process ends
    for name, (owner, method) in stages.items():
        setattr(owner, method, marked(name, getattr(owner, method), marks))


def main() -> None:
    """Mark the stages, then run the worker's own main."""
    _, role, file, *flags = sys.argv
    mark_stages(Path(file))
    sys.argv = [f"{role}_worker", *flags]
    runpy.run_module(f"baton.{role}_worker", run_name="__main__")


if __name__ == "__main__":
    main()
