"""A worker or a router as it is, that writes down at its end how much CPU time some of its functions took.

    .venv/bin/python -m baton.benchmarks.cluster.metered_process prefill|decode|router FILE [flags of the process ...]

By the clock of the thread, less the clock's own time; what is wrapped must not call each other. Of a coroutine
only what it computes is counted, not what others do while it waits. Wrapped from outside: the processes know nothing
of it.
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
from pathlib import Path
from types import ModuleType
from typing import Any

from baton.service.config import read_config_or_exit

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
    from baton.engine.plan import Drawn
    from baton.worker.decode.retained import RetainedOutputs

    kept, token = RetainedOutputs(), Drawn(5, -0.5)
    for _ in range(count):
        kept.add(0, token, None)


def run_worker(role: str, meter: Meter) -> int:
    from baton.engine.runner.thread import EngineThread
    from baton.kvtransfer.checksum import Checksums
    from baton.worker.decode.config import DecodeConfig
    from baton.worker.decode.request_table import RequestTable
    from baton.worker.decode.retained import RetainedOutputs
    from baton.worker.decode.role import main as decode_main
    from baton.worker.prefill.config import PrefillConfig
    from baton.worker.prefill.role import main as prefill_main
    from baton.worker.transfer import reader as transfer_reader
    from baton.worker.transfer.source import TransferSource

    meter.count("kept outputs", RetainedOutputs, "add", keep_tokens)
    meter.wrap("kept answers", RequestTable, "keep")
    meter.wrap("checksums", Checksums, "of")
    meter.wrap("confirmations", transfer_reader, "keep_confirming")
    meter.wrap("confirmations", TransferSource, "Confirm")
    meter.wrap("steps", EngineThread, "_step")
    if role == "prefill":
        return prefill_main(read_config_or_exit(PrefillConfig, "prefill_worker"))
    return decode_main(read_config_or_exit(DecodeConfig, "decode_worker"))


def run_router(meter: Meter) -> int:
    from baton.router.request.journal import Entry, Journal

    for owner, name in ((Journal, "open"), (Journal, "write"), (Entry, "placed"), (Entry, "left"), (Entry, "end")):
        meter.wrap("journal", owner, name)
    runpy.run_module("baton.router", run_name="__main__")
    return 0


def main() -> int:
    _, role, file, *flags = sys.argv
    meter = Meter()
    atexit.register(meter.write, Path(file))
    sys.argv = [role if role == "router" else f"{role}_worker", *flags]
    return run_router(meter) if role == "router" else run_worker(role, meter)


if __name__ == "__main__":
    sys.exit(main())
