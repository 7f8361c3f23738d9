"""A watchdog on a clock that a test turns: what stands still is reported, what only had no time is not."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.request import Request
from baton.engine.runner.engine import Engine
from baton.engine.runner.loop import EngineLoop
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.scheduler import Scheduler
from baton.process.serving.exit_codes import ExitCode
from baton.process.serving.health import Health
from baton.process.serving.server import Running
from baton.process.serving.watchdog import CHECKS, ProgressTimer, Watchdog
from baton.process.serving.watchdog_sibling import is_stopped, still_for
from tests.fixtures.held_runner import HeldRunner
from tests.fixtures.loop_clock import Clock
from tests.fixtures.session_client import eventually

BOUND_S = 30.0
LOOK_S = BOUND_S / CHECKS


async def one_turn(loop: EngineLoop) -> None:
    before = loop.turns
    await asyncio.wrap_future(loop._thread.call(lambda: None))
    await eventually(lambda: loop.turns != before)


def watched(progress: Callable[[], int | None]) -> tuple[Watchdog, Clock, list[str]]:
    clock, stalled = Clock(), list[str]()
    watchdog = Watchdog(BOUND_S, lambda name, still_s: stalled.append(f"{name} {still_s:g}"), clock)
    watchdog.watch("engine", progress)
    return watchdog, clock, stalled


def look(watchdog: Watchdog, clock: Clock, times: int, every_s: float = LOOK_S) -> None:
    for _ in range(times):
        clock.now_s += every_s
        watchdog.look()


async def test_engine_with_a_hanging_step_is_reported() -> None:
    runner = HeldRunner()
    engine = Engine(runner, Scheduler(BlockPool(4), 4, 8, max_sequences=1))
    loop = EngineLoop(engine, lambda *_: None, lambda fault: None)
    assert loop.turns is None, "nothing is watched before it is warm"
    await loop.start()
    watchdog, clock, stalled = watched(lambda: loop.turns)
    for _ in range(3 * CHECKS):  # idle, it still turns
        await one_turn(loop)
        look(watchdog, clock, 1)
    assert stalled == []

    runner.hold()
    await asyncio.wrap_future(loop.add(Request(1, (1, 2), SamplingParams(max_tokens=1), ())))
    await eventually(runner.stepping.is_set)
    look(watchdog, clock, CHECKS - 1)
    assert stalled == []
    look(watchdog, clock, 3)
    assert stalled and stalled[0].startswith("engine 3")
    runner.let_go()
    assert await asyncio.to_thread(loop.stop, 5.0)
    assert loop.turns is None


def test_absent_engine_is_not_watched() -> None:
    watchdog, clock, stalled = watched(lambda: None)
    look(watchdog, clock, 3 * CHECKS)
    assert stalled == []


def test_process_that_was_stopped_for_long_has_not_stood_still() -> None:
    watchdog, clock, stalled = watched(lambda: 7)
    look(watchdog, clock, 1)
    look(watchdog, clock, 3, every_s=3600.0)
    assert stalled == []


def test_any_progress_restarts_the_timer() -> None:
    timer = ProgressTimer(longest_check_s=1.0)
    assert [timer.observe(number, now) for now, number in enumerate([1, 1, 1, 2, 2, 1])] == [0, 1, 2, 0, 1, 0]


async def test_event_loop_that_turns_moves_its_heartbeat() -> None:
    running = Running((), Health(()), stall_s=0.04)
    beating = asyncio.create_task(running.beat())
    await eventually(lambda: running._beats > 3)
    beating.cancel()


HANGS = """
import asyncio, sys, time
from baton.process.serving.server import serve

class Hanging:
    listeners = ()
    async def start(self, running):
        asyncio.get_running_loop().call_later(0.05, where_it_hangs)
    async def drain(self): ...
    async def stop(self): ...

def where_it_hangs():
    HANG

sys.exit(asyncio.run(serve(Hanging(), stall_s=1.0)))
"""


def hang(statement: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", HANGS.replace("HANG\n", f"{statement}\n")]
    return subprocess.run(command, capture_output=True, timeout=60, check=False, text=True)


def test_hanging_event_loop_ends_the_process_with_its_code_and_stack() -> None:
    ended = hang("time.sleep(60)")
    assert ended.returncode == ExitCode.STALLED
    assert "the event loop has made no progress" in ended.stderr
    assert "where_it_hangs" in ended.stderr


def test_held_interpreter_lock_kills_the_process_with_its_stack() -> None:
    ended = hang("sum(range(10**12))")  # hours in one call of C
    assert ended.returncode == -signal.SIGKILL
    assert "interpreter lock held" in ended.stderr
    assert "where_it_hangs" in ended.stderr


def beats(*heard: bool | None) -> Callable[[], bool | None]:
    each: Iterator[bool | None] = iter(heard)
    return lambda: next(each)


def test_sibling_reports_a_missing_beat_and_a_beat_restarts_the_timer() -> None:
    assert still_for(2.0, 1.0, beats(False, False, True, False, False, False), lambda: False) == 3.0
    assert still_for(2.0, 1.0, beats(False, False, None), lambda: False) is None


def test_sibling_counts_no_time_in_which_the_process_is_stopped() -> None:
    assert still_for(2.0, 1.0, beats(*[False] * 9, None), lambda: True) is None


def test_stopped_process_is_distinguished_from_a_running_one() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert is_stopped(process.pid)
        process.kill()


def test_watchdog_checks_periodically_until_closed() -> None:
    stalled: list[str] = []
    watchdog = Watchdog(0.05, lambda name, still_s: stalled.append(name))
    watchdog.watch("engine", lambda: 1)
    watchdog.start()
    while not stalled:
        watchdog._thread.join(0.005)
    watchdog.close()
    assert not watchdog._thread.is_alive()
