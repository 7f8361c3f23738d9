"""A worker as it is, but for a file that says when each stage of a hand-over began and ended.

    .venv/bin/python -m baton.benchmarks.transfer.marked_worker prefill|decode MARKS [flags of the worker ...]

One JSON line per stage: its name, begin and end in seconds of time.monotonic, which on Linux all processes of a machine
share. The stages are methods, wrapped from outside: the workers themselves know nothing of it.
"""

import functools
import inspect
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from baton.engine.runner.thread import EngineThread
from baton.service.config import read_config_or_exit
from baton.worker.decode.config import DecodeConfig
from baton.worker.decode.loop import DecodeLoop
from baton.worker.decode.role import main as decode_main
from baton.worker.prefill.config import PrefillConfig
from baton.worker.prefill.role import main as prefill_main
from baton.worker.transfer.reader import TransferReader
from baton.worker.transfer.source import TransferSource

STAGES = {
    "step": (EngineThread, "_step"),
    "advance": (TransferSource, "advance"),
    "copy": (TransferReader, "_copy_new"),
    "confirm": (TransferReader, "_confirm"),
    "activate": (DecodeLoop, "activate"),
}


def wrap(name: str, method: Callable[..., Any], marks: TextIO) -> Callable[..., Any]:
    def note(began: float, result: object) -> None:
        if result is not False:  # a step that had nothing to do
            marks.write(json.dumps([name, began, time.monotonic()]) + "\n")

    @functools.wraps(method)
    def marked(*arguments: Any, **named: Any) -> Any:
        began = time.monotonic()
        result = method(*arguments, **named)
        note(began, result)
        return result

    @functools.wraps(method)
    async def marked_coroutine(*arguments: Any, **named: Any) -> Any:
        began = time.monotonic()
        result = await method(*arguments, **named)
        note(began, result)
        return result

    return marked_coroutine if inspect.iscoroutinefunction(method) else marked


def main() -> int:
    _, role, marks_path, *flags = sys.argv
    marks = Path(marks_path).open("a", buffering=1)  # noqa: SIM115 -- open until the process ends
    for name, (owner, method) in STAGES.items():
        setattr(owner, method, wrap(name, getattr(owner, method), marks))
    sys.argv = [f"{role}_worker", *flags]
    if role == "prefill":
        return prefill_main(read_config_or_exit(PrefillConfig, "prefill_worker"))
    return decode_main(read_config_or_exit(DecodeConfig, "decode_worker"))


if __name__ == "__main__":
    sys.exit(main())
