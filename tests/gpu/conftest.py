"""Lets several processes share the tests of a GPU out among themselves: what takes time is compiling their kernels.

A test that breaks the device would fail all that come after it in its process, and one that hangs would keep them
waiting: such a test ends the process. Who started it reads which one it was, and goes on behind it in a new one.
"""

import faulthandler
import sys
from collections.abc import Generator
from pathlib import Path
from typing import IO

import pytest

from baton.lab.benchmarks.gpu.processes import DEVICE_LOST

EXIT_S = 10.0  # for a process that has lost its device: CUDA may hang at its end


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", help="I/N: every N-th test, from the I-th on")
    parser.addoption("--after", default="", help="TEST: of the part only those behind it")
    parser.addoption("--running", default="", help="FILE: names the test that runs; gone where none does")
    parser.addoption("--most-seconds", type=float, default=0.0, help="of one test, with --running; it ends the process")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, parts = map(int, str(config.getoption("--part")).split("/"))
    items[:] = items[part - 1 :: parts]
    if after := config.getoption("--after"):
        del items[: [item.nodeid for item in items].index(after) + 1]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if not item.config.getoption("--running"):
        return (yield)
    path = Path(str(item.config.getoption("--running")))
    with path.open("w") as running:
        print(item.nodeid, file=running, flush=True)
        _end_after(float(item.config.getoption("--most-seconds")), running)
        result = yield
        faulthandler.cancel_dump_traceback_later()
        if error := _device_error():
            print(error, file=running, flush=True)
            _end_after(EXIT_S, sys.__stderr__)
            pytest.exit(f"{item.nodeid} broke the device: {error}", returncode=DEVICE_LOST)
    path.unlink()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Says at once why one failed: pytest does at the end, which a process may not reach."""
    report = yield
    reporter = item.config.pluginmanager.get_plugin("terminalreporter")
    if report.failed and reporter is not None and item.config.getoption("--running"):
        reporter.write_line(f"\n{report.longreprtext}")
    return report


def _end_after(limit_s: float, output: IO[str] | None) -> None:
    """Ends the process, and writes where each of its threads was."""
    if limit_s and output is not None:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=output)


def _device_error() -> str:
    """Of any kernel that has run by now: else a later test would meet it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error)
    return ""
