"""`baton chat` at a real terminal: what Ctrl-C and Ctrl-D do there."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from baton import IMPORT_PATH
from baton.protos import baton_pb2_grpc
from tests.client.conftest import Events, FakeBaton

WAIT_S = 60.0


class Terminal:
    """The command at a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-P", "-m", "baton.cli", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(IMPORT_PATH), "TERM": "dumb"}
        # A session of its own makes the terminal its own: Ctrl-C reaches the command alone.
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)
        self.shown = ""

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait_for(self, text: str) -> None:
        """Until it is shown, after what was waited for before."""
        deadline = time.monotonic() + WAIT_S
        while text not in self.shown:
            readable, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, f"no {text!r} in {self.shown!r}"
            self.shown += os.read(self._ours, 4096).decode()
        self.shown = self.shown.partition(text)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


_TAKE_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background job inherits it ignored
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture
def baton() -> Iterator[FakeBaton]:
    fake = FakeBaton([])
    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    baton_pb2_grpc.add_BatonServiceServicer_to_server(fake, server)
    fake.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield fake
    server.stop(grace=0).wait(timeout=5)


def test_ctrl_c_cancels_the_call_and_ctrl_d_ends_the_conversation(baton: FakeBaton) -> None:
    events = Events()

    def endless(request: Any, context: grpc.ServicerContext) -> Any:
        yield events.started()
        yield events.delta(0, [5], "never ")
        baton.ended.wait(timeout=WAIT_S)

    def whole(request: Any, context: grpc.ServicerContext) -> Any:
        yield from (events.started(), events.delta(0, [5], "done"), events.finished())

    baton.answers = [endless, whole]
    terminal = Terminal("chat", "--target", baton.target)
    try:
        terminal.wait_for("> ")
        terminal.type("one\n")
        terminal.wait_for("never ")
        terminal.type("\x03")
        terminal.wait_for("(cancelled)")
        assert baton.ended.wait(timeout=WAIT_S)  # the server has heard of it
        terminal.wait_for("> ")
        terminal.type("two\n")
        terminal.wait_for("done")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(WAIT_S) == 0
    finally:
        terminal.close()
    told = [(message.role, message.content) for message in baton.requests[1].messages]
    assert told == [("user", "one"), ("assistant", "never "), ("user", "two")]
