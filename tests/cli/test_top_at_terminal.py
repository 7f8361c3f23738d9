"""`baton top` at a real terminal and without one, beside a router that is made up."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
import pytest

from baton import IMPORT_PATH
from baton.process.registry.redis_server import free_port
from baton.protos import admin_pb2, admin_pb2_grpc
from tests.fixtures.servers import threaded_server
from tests.fixtures.terminal import WAIT_S, Terminal

ALTERNATE, USUAL = "\x1b[?1049h", "\x1b[?1049l"
STALL = admin_pb2.RequestStall(
    at_ms=70.0,
    gap_ms=40.0,
    usual_ms=5.0,
    causes=[admin_pb2.RequestStallCause(cause="prompt_tokens", ms=35.0, culprit="req-long", detail="1024 tokens")],
)


def request(number: int, phase: str = "answered") -> admin_pb2.RecentRequest:
    return admin_pb2.RecentRequest(
        request_id=f"req-number{number}",
        trace_id=f"{number:032x}",
        phase=phase,
        decode="decode-0",
        prompt_tokens=3,
        generated_tokens=9,
        stages=admin_pb2.RequestStages(ttft_ms=10.0, prefill_ms=10.0, total_ms=100.0),
        tbt=admin_pb2.TokenTimes(p50_ms=5.0, p99_ms=6.0, max_ms=40.0),
    )


class Admin(admin_pb2_grpc.AdminServiceServicer):
    """A router with two requests. Stalls are listed of the one that is asked for by name."""

    target = ""

    def __init__(self) -> None:
        self.looks = 0

    def GetStatus(self, message: Any, context: grpc.ServicerContext) -> admin_pb2.GetStatusResponse:
        self.looks += 1
        return admin_pb2.GetStatusResponse(ready=True, active_requests=1)

    def RecentRequests(self, message: Any, context: grpc.ServicerContext) -> admin_pb2.RecentRequestsResponse:
        if not message.request_id:
            return admin_pb2.RecentRequestsResponse(requests=[request(1, "decode"), request(2)])
        named = request(int(message.request_id[-1]))
        named.stalls.append(STALL)
        named.stall_count = 1
        return admin_pb2.RecentRequestsResponse(requests=[named])


@pytest.fixture
def admin() -> Iterator[Admin]:
    fake = Admin()
    with threaded_server(partial(admin_pb2_grpc.add_AdminServiceServicer_to_server, fake)) as port:
        fake.target = f"127.0.0.1:{port}"
        yield fake


@pytest.fixture
def terminal(admin: Admin) -> Iterator[Terminal]:
    """Where it runs and has shown its first frame."""
    terminal = Terminal("top", "--admin", admin.target, kind="xterm")
    terminal.wait_for(ALTERNATE)
    terminal.wait_for("number2")
    assert not terminal.echoes
    yield terminal
    terminal.close()


def test_top_at_terminal_handles_keys(terminal: Terminal) -> None:
    terminal.type("j\x1b[B")
    terminal.wait_for("> number2")
    terminal.type("\r")
    terminal.wait_for("req-number2 ")
    terminal.wait_for("req-long, 35 ms (1024 tokens)")
    terminal.type("k")
    terminal.wait_for("req-number1 ")
    terminal.type("\x1b")
    terminal.wait_for("> number1")
    terminal.type("s")
    terminal.wait_for("s sort: TTFT")
    terminal.type("p")
    terminal.wait_for("paused")
    terminal.type("q")
    assert terminal.wait_for_end() == 0
    assert USUAL in terminal.shown and terminal.echoes


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 0)])
def test_top_at_signal_restores_terminal(terminal: Terminal, number: signal.Signals, code: int) -> None:
    terminal.process.send_signal(number)
    assert terminal.wait_for_end() == code
    assert USUAL in terminal.shown and terminal.echoes


def test_top_without_router_handles_keys() -> None:
    unanswered = Terminal("top", "--admin", f"127.0.0.1:{free_port()}", kind="xterm")
    try:
        unanswered.wait_for("no answer from")
        unanswered.type("q")
        assert unanswered.wait_for_end() == 0
        assert unanswered.echoes
    finally:
        unanswered.close()


def run(*arguments: str, columns: int = 80) -> subprocess.CompletedProcess[str]:
    """Without a terminal."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "baton.cli", "top", *arguments],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env={"PYTHONPATH": str(IMPORT_PATH), "COLUMNS": str(columns), "PATH": "/usr/bin:/bin"},
        check=False,
    )


@pytest.mark.parametrize("arguments", [(), ("--once",)])
def test_top_without_terminal_prints_one_frame(admin: Admin, arguments: tuple[str, ...]) -> None:
    ended = run("--admin", admin.target, *arguments)
    assert (ended.returncode, ended.stderr, admin.looks) == (0, "", 2)
    assert "tokens per second: 0 prompt, 0 generated" in ended.stdout
    assert "number2" in ended.stdout and "q quit" not in ended.stdout and "\x1b" not in ended.stdout


def test_top_once_at_terminal_prints_one_frame(admin: Admin) -> None:
    terminal = Terminal("top", "--once", "--admin", admin.target, kind="xterm")
    try:
        terminal.wait_for("number2")
        assert terminal.wait_for_end() == 0
        assert ALTERNATE not in terminal.shown
    finally:
        terminal.close()


def test_top_once_without_router_fails() -> None:
    ended = run("--once", "--admin", f"127.0.0.1:{free_port()}")
    assert ended.returncode == 1
    assert "no answer from" in ended.stderr and "`baton up`" in ended.stderr
