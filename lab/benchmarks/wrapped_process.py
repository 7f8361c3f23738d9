"""A worker or a router as it is, but for some functions, which are wrapped from outside: it knows nothing of it.

    .venv/bin/python -m baton.lab.benchmarks.wrapped_process meter|marks prefill|decode|router FILE [its flags ...]

`meter` writes at the process's end how much CPU time these functions took: by the clock of the thread, less the clock's
own time; what is wrapped must not call each other. Of a coroutine only what it computes is counted, not what others do
while it waits.

`marks` writes when each stage of a hand-over began and ended: one JSON line per stage, its name, begin and end in
seconds of time.monotonic, which on Linux all processes of a machine share.
"""

import atexit
import functools
import inspect
import json
import runpy
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

CALIBRATION_READS = 2001
TRIALS = 20_000


class Meter:
    def __init__(self) -> None:
        self.nanoseconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.spans: Counter[str] = Counter()  # times that a clock was read twice

    def wrap(self, name: str, owner: type | ModuleType, method_name: str) -> None:
        method = getattr(owner, method_name)

        @functools.wraps(method)
        def metered(*arguments: Any) -> Any:
            self.calls[name] += 1
            self.spans[name] += 1
            began = time.thread_time_ns()
            try:
                return method(*arguments)
            finally:
                self.nanoseconds[name] += time.thread_time_ns() - began

        @functools.wraps(method)
        async def metered_coroutine(*arguments: Any, **named: Any) -> Any:
            self.calls[name] += 1
            return await _Resumed(method(*arguments, **named), functools.partial(self._spend, name))

        setattr(owner, method_name, metered_coroutine if inspect.iscoroutinefunction(method) else metered)

    def count(self, name: str, owner: type, method_name: str, trial: Callable[[int], object]) -> None:
        """For what takes less than reading a clock: calls are counted, and timed at the end, many by `trial`."""
        method = getattr(owner, method_name)

        @functools.wraps(method)
        def counted(*arguments: Any) -> Any:
            self.calls[name] += 1
            return method(*arguments)

        def time_it() -> None:
            calls, self.calls[name] = self.calls[name], 0
            setattr(owner, method_name, method)
            began = time.thread_time_ns()
            trial(TRIALS)
            self.nanoseconds[name] += round((time.thread_time_ns() - began) / TRIALS * calls)
            self.calls[name] = calls

        setattr(owner, method_name, counted)
        atexit.register(time_it)  # before `write`, which was registered earlier

    def _spend(self, name: str, work: Callable[[], Any]) -> Any:
        self.spans[name] += 1
        began = time.thread_time_ns()
        try:
            return work()
        finally:
            self.nanoseconds[name] += time.thread_time_ns() - began

    def write(self, file: Path) -> None:
        clock_ns = time_of_the_clock_ns()
        net = {name: max(0.0, spent - clock_ns * self.spans[name]) for name, spent in self.nanoseconds.items()}
        file.write_text(json.dumps({"nanoseconds": net, "calls": self.calls}))


def time_of_the_clock_ns() -> float:
    """What a span of nothing is measured to take: reading the clock may cost more than what is measured."""
    spans = []
    for _ in range(CALIBRATION_READS):
        began = time.thread_time_ns()
        spans.append(time.thread_time_ns() - began)
    return statistics.median(spans)


class _Resumed:
    """A coroutine of which each piece between two waits is handed to `spend`."""

    def __init__(self, coroutine: Any, spend: Callable[[Callable[[], Any]], Any]) -> None:
        self._coroutine = coroutine
        self._spend = spend

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self._coroutine.__await__()
        resume = functools.partial(inner.send, None)
        while True:
            try:
                waited_for = self._spend(resume)
            except StopIteration as returned:
                return returned.value
            try:
                resume = functools.partial(inner.send, (yield waited_for))
            except BaseException as error:  # noqa: BLE001 -- a cancellation too is the coroutine's
                resume = functools.partial(inner.throw, error)


def keep_tokens(count: int) -> None:
    from baton.decode_worker.retained import RetainedOutputs
    from baton.engine.request import Drawn

    kept, token = RetainedOutputs(), Drawn(5, -0.5)
    for _ in range(count):
        kept.add(0, token, None)


def meter_process(role: str, file: Path) -> None:
    meter = Meter()
    atexit.register(meter.write, file)
    if role == "router":
        from baton.router.request.journal import Entry, Journal

        for owner, name in ((Journal, "open"), (Journal, "write"), (Entry, "placed"), (Entry, "left"), (Entry, "end")):
            meter.wrap("journal", owner, name)
        from baton.process.telemetry.loop_lag import LoopLag
        from baton.router.trace import spans
        from baton.router.trace.recent import RecentTimelines

        meter.wrap("stalls", spans, "gap_summary")
        meter.wrap("timelines", RecentTimelines, "add")
        meter.wrap("loop lag", LoopLag, "_look")
        return
    from baton.decode_worker.request_table import AnswerTable
    from baton.decode_worker.retained import RetainedOutputs
    from baton.engine.runner.thread import EngineThread
    from baton.kvtransfer.checksum import Checksums
    from baton.worker.at_rest.checker import RestChecker
    from baton.worker.transfer import reader as transfer_reader
    from baton.worker.transfer.source import TransferSource

    meter.count("kept outputs", RetainedOutputs, "add", keep_tokens)
    meter.wrap("kept answers", AnswerTable, "keep")
    meter.wrap("checksums", Checksums, "of")
    for name in ("on_changes", "drawn", "check"):  # what they have summed is among the checksums
        meter.wrap("at rest", RestChecker, name)
    meter.wrap("confirmations", transfer_reader, "keep_confirming")
    meter.wrap("confirmations", TransferSource, "Confirm")
    meter.wrap("steps", EngineThread, "_step")
    from baton.decode_worker.gaps import StepGaps
    from baton.engine.runner.step_records import HandOver, StepRecorder
    from baton.worker import service
    from baton.worker.times import RequestTimes

    meter.wrap("step records", StepRecorder, "record")
    meter.wrap("hand-overs", HandOver, "take")
    for name in ("begin", "explain", "held", "since"):
        meter.wrap("gaps", StepGaps, name)
    meter.wrap("request times", RequestTimes, "add_tokens")
    meter.wrap("worker spans", service, "write_spans")


@dataclass(frozen=True, slots=True)
class Marks:
    """Of one worker, in order: (name, begin, end)."""

    path: Path

    def since(self, moment: float) -> list[tuple[str, float, float]]:
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [(name, begin, end) for name, begin, end in lines if begin >= moment]


def marked(name: str, method: Callable[..., Any], marks: TextIO) -> Callable[..., Any]:
    def note(began: float, result: object) -> None:
        if result is not False:  # a step that had nothing to do
            marks.write(json.dumps([name, began, time.monotonic()]) + "\n")

    @functools.wraps(method)
    def plain(*arguments: Any, **named: Any) -> Any:
        began = time.monotonic()
        result = method(*arguments, **named)
        note(began, result)
        return result

    @functools.wraps(method)
    async def coroutine(*arguments: Any, **named: Any) -> Any:
        began = time.monotonic()
        result = await method(*arguments, **named)
        note(began, result)
        return result

    return coroutine if inspect.iscoroutinefunction(method) else plain


def mark_stages(_: str, file: Path) -> None:
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
    _, what, role, file, *flags = sys.argv
    {"meter": meter_process, "marks": mark_stages}[what](role, Path(file))
    module = role if role == "router" else f"{role}_worker"
    sys.argv = [module, *flags]
    runpy.run_module(f"baton.{module}", run_name="__main__")


if __name__ == "__main__":
    main()
