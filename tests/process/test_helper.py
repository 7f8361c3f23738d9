"""A process that helps an event loop: what it says, and what is said where it ends or hangs."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator

import pytest

from baton.process.helper import NICENESS, Helper, HelperBusy, HelperFailed

MODULE = "tests.fixtures.helper_for_tests"
MEGABYTE = 1 << 20


@pytest.fixture
async def helper() -> AsyncIterator[Helper]:
    made = Helper(MODULE)
    yield made
    made.close()


async def test_helper_joins_parts_to_one_question(helper: Helper) -> None:
    assert await helper.ask([b"he", b"", b"llo"]) == b"said hello"


async def test_helper_returns_megabytes_unchanged(helper: Helper) -> None:
    sent = bytes(range(256)) * (4 * MEGABYTE // 256)

    assert (await helper.ask([sent]))[5:] == sent


async def test_helper_is_one_process_of_low_priority(helper: Helper) -> None:
    answers = await asyncio.gather(*(helper.ask([b"pid"]) for _ in range(8)))

    assert len({bytes(each) for each in answers}) == 1
    assert int(await helper.ask([b"nice"])) >= min(19, NICENESS)


async def test_helper_ignores_group_signals_and_continues(helper: Helper) -> None:
    pid = int(bytes(await helper.ask([b"pid"])).removeprefix(b"said "))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(pid, number)
    assert int(bytes(await helper.ask([b"pid"])).removeprefix(b"said ")) == pid


async def test_helper_that_ends_fails_the_question_under_way_alone(helper: Helper) -> None:
    with pytest.raises(HelperFailed):
        await helper.ask([b"end"])

    assert await helper.ask([b"a"]) == b"said a"


async def test_helper_that_hangs_is_ended_in_time() -> None:
    helper = Helper(MODULE, limit_s=0.5)
    try:
        assert await helper.ask([b"a"]) == b"said a"  # it has started
        async with asyncio.timeout(20):
            with pytest.raises(HelperFailed):
                await helper.ask([b"hang"])
    finally:
        helper.close()


async def test_helper_with_too_much_waiting_refuses_questions() -> None:
    helper = Helper(MODULE, max_waiting_bytes=3)
    try:
        waiting = [asyncio.ensure_future(helper.ask([b"a"])) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(HelperBusy):
            await helper.ask([b"b", b"c"])
        assert await asyncio.gather(*waiting) == [b"said a"] * 2
        assert helper.waiting_bytes == 0
    finally:
        helper.close()


async def test_closed_helper_starts_no_process() -> None:
    helper = Helper(MODULE)
    helper.close()

    with pytest.raises((HelperFailed, RuntimeError)):
        await helper.ask([b"a"])


async def test_close_of_an_unreaped_killed_helper_returns(
    helper: Helper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert await helper.ask([b"a"]) == b"said a"
    running = helper.processes[0]._running
    assert running is not None

    def never(self: object, timeout: float) -> int:
        raise subprocess.TimeoutExpired("helper", timeout)

    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "wait", never)
        helper.close()

    assert "still exists" in caplog.text
    assert running.popen.wait(20) == -signal.SIGKILL
    assert running.ours.fileno() == -1
