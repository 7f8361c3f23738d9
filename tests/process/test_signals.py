"""What each signal does: before a process serves, while it serves, and in processes that work for another."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.fixtures.waiting import wait_until

BOUND_S = 60.0
LOADING = """
import threading
from baton.process.serving.signals import prepare_signals
prepare_signals()
threading.Thread(target=threading.Event().wait, args=(60,)).start()  # as a model that loads
print("loading", flush=True)
for _ in range(600):  # in short waits: Python handles a signal that arrives just before a wait only after it
    threading.Event().wait(0.1)
"""
SERVING = """
import asyncio, logging, sys
logging.basicConfig(level="INFO")
from baton.process.serving.signals import prepare_signals
prepare_signals()
from baton.process.serving.server import run, serve

class Example:
    listeners = ()
    async def start(self, running):
        running.reloads.append(lambda: print("reloaded", flush=True))
        print("serving", flush=True)
    async def drain(self):
        print("draining", flush=True)
        if "held" in sys.argv:
            await asyncio.sleep(60)
    async def stop(self):
        print("stopped", flush=True)

sys.exit(run(serve(Example())))
"""
RANK = """
import sys, socket
ours, theirs = socket.socketpair()
from baton.engine.parallel import rank_process, wire
sys.argv = ["rank", str(theirs.detach())]
def start(frame):
    print("following", flush=True)
    sys.stdin.read()
    sys.exit()
rank_process.RankStart = type("", (), {"of_bytes": staticmethod(start)})
wire.send(ours, wire.START, b"")
rank_process.main()
"""
HELPER = """
import sys
from baton.process.serving.signals import leave_signals_to_parent
leave_signals_to_parent()
print("following", flush=True)
sys.stdin.read()
"""


HARMLESS = (signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)


class Program:
    def __init__(self, popen: subprocess.Popen[bytes], output: int) -> None:
        self._popen = popen
        self._output = output
        self.text = ""

    def send(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            self._popen.send_signal(number)

    def until(self, wanted: str) -> None:
        while wanted not in self.text:
            part = os.read(self._output, 1 << 16)
            assert part, f"ended before it said {wanted!r}: {self.text}"
            self.text += part.decode()

    def exit_code(self) -> int:
        code = self._popen.wait(BOUND_S)
        with suppress(OSError):
            while part := os.read(self._output, 1 << 16):
                self.text += part.decode()
        return code


@contextmanager
def program(source: str, *arguments: str, own: Callable[[], None] | None = None) -> Iterator[Program]:
    """Without a terminal, in a session of its own."""
    reader, writer = os.pipe()
    popen = subprocess.Popen(
        [sys.executable, "-P", "-c", source, *arguments],
        stdin=subprocess.PIPE,
        stdout=writer,
        stderr=writer,
        start_new_session=True,
        preexec_fn=own,
    )
    os.close(writer)
    try:
        yield Program(popen, reader)
    finally:
        popen.kill()
        popen.communicate()
        os.close(reader)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_before_serving_ends_the_process_by_its_handler(number: signal.Signals) -> None:
    """A default would end this one too, but not process 1: the exit code shows which of the two it was."""
    with program(LOADING) as process:
        process.until("loading")
        process.send(signal.SIGHUP, *HARMLESS)
        process.until("most recent call first")  # the stacks that SIGQUIT has written
        process.send(number)
        assert process.exit_code() == 128 + number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serving_process_drains_on_signal_after_harmless_ones(number: signal.Signals) -> None:
    with program(SERVING) as process:
        process.until("serving")
        process.send(*HARMLESS)
        process.until("most recent call first")
        process.send(number)
        assert process.exit_code() == 0 and "draining" in process.text and "stopped" in process.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serving_process_exits_immediately_on_a_second_signal(number: signal.Signals) -> None:
    with program(SERVING, "held") as process:
        process.until("serving")
        process.send(signal.SIGTERM)
        process.until("draining\n")
        process.send(number)
        assert process.exit_code() == 1 and "stopping without waiting" in process.text


def test_hangup_of_a_daemon_reloads_and_serves_on() -> None:
    with program(SERVING) as process:
        process.until("serving")
        process.send(signal.SIGHUP)
        process.until("reloaded")
        process.send(signal.SIGTERM)
        assert process.exit_code() == 0


def test_hangup_of_a_process_of_nohup_reloads_and_serves_on() -> None:
    with program(SERVING, own=ignore_hangup) as process:
        process.until("serving")
        process.send(signal.SIGHUP)
        process.until("reloaded")


def ignore_hangup() -> None:
    """As nohup does."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def at_terminal(folder: Path) -> tuple[int, int]:
    """The serving program as the leader of a terminal's session: its id, and the terminal's other end."""
    pid, terminal = pty.fork()
    if pid == 0:
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.execv(sys.executable, [sys.executable, "-P", "-c", SERVING])
    return pid, terminal


def test_closed_terminal_drains_and_a_signal_by_hand_reloads(tmp_path: Path) -> None:
    pid, terminal = at_terminal(tmp_path)
    log = tmp_path / "log"
    try:
        wait_until(lambda: log.exists() and "serving" in log.read_text())
        os.kill(pid, signal.SIGHUP)
        wait_until(lambda: "reloaded" in log.read_text())
        os.close(terminal)
        wait_until(lambda: "stopped" in log.read_text())
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert "the terminal is closed: draining" in log.read_text()


@pytest.mark.parametrize("source", [RANK, HELPER], ids=["rank", "helper"])
def test_process_that_works_for_another_ends_with_it_and_not_by_signals(source: str) -> None:
    with program(source) as process:
        process.until("following")
        process.send(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
        process.until("most recent call first")
        assert process._popen.stdin is not None
        process._popen.stdin.close()
        assert process.exit_code() == 0
