"""The meter around functions of a process: what they compute is counted, and nothing about them changes."""

import asyncio
import os
from pathlib import Path

import pytest

from baton.lab.benchmarks.wrapped_process import Meter
from tests.fixtures.preloaded import Forked


class Worked:
    def add(self, number: int) -> int:
        return sum(range(number))

    async def wait(self, event: asyncio.Event) -> str:
        self.add(200_000)
        await event.wait()
        self.add(200_000)
        return "done"


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    made = Meter()
    for name in ("add", "wait"):
        monkeypatch.setattr(Worked, name, vars(Worked)[name])  # as it was, once the test is over
    made.wrap("waits", Worked, "wait")
    return made


def test_calls_and_their_time_are_counted(meter: Meter) -> None:
    meter.wrap("adds", Worked, "add")
    assert Worked().add(100_000) == sum(range(100_000))
    assert meter.calls == {"adds": 1} and meter.nanoseconds["adds"] > 100_000


async def test_of_a_coroutine_what_others_do_meanwhile_is_not_counted(meter: Meter) -> None:
    event = asyncio.Event()
    waiting = asyncio.create_task(Worked().wait(event))
    await asyncio.sleep(0)
    own = meter.nanoseconds["waits"]
    assert own > 100_000
    Worked().add(3_000_000)  # somebody else's, while it waits
    event.set()
    assert await waiting == "done"
    assert meter.calls == {"waits": 1} and own < meter.nanoseconds["waits"] < 5 * own


async def test_a_cancelled_coroutine_is_cancelled(meter: Meter) -> None:
    waiting = asyncio.create_task(Worked().wait(asyncio.Event()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize(("what", "role"), [("meter", "decode"), ("meter", "router"), ("marks", "prefill")])
def test_what_is_wrapped_is_there_and_the_process_reads_its_flags(what: str, role: str, tmp_path: Path) -> None:
    log, arguments = tmp_path / "log", [what, role, str(tmp_path / "file"), "--help"]
    status = Forked("baton.lab.benchmarks.wrapped_process", arguments, log, os.environ).wait(60)
    assert status == 0, log.read_text()
    assert "--log-level" in log.read_text()
