"""`baton status --watch`: frame after frame, whatever becomes of the router."""

import json
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest

import baton.cli.status
from baton.cli.status import NOTICE_S, PERIOD_S, WatchFrame, frame_lines, frames, watch_status
from baton.client import BatonClientError, ClusterStatus, Unavailable
from tests.cli.test_status_output import LARGE, status
from tests.fixtures.admin_clients import FakeAdmin

TARGET = "127.0.0.1:50052 (admin port)"


class Router:
    """Answers as `script` says, the last entry for good. Each answer takes a fifth of a second of a made-up clock."""

    def __init__(self, *script: ClusterStatus | BatonClientError) -> None:
        self._script = list(script)
        self.now = 100.0
        self.asked_s: list[float] = []

    def snapshot(self) -> ClusterStatus:
        self.asked_s.append(self.now)
        self.now += 0.2
        answer = self._script.pop(0) if len(self._script) > 1 else self._script[0]
        if isinstance(answer, BatonClientError):
            raise answer
        return answer

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def frames(self) -> Iterator[WatchFrame[ClusterStatus]]:
        return frames(self.snapshot, TARGET, lambda: self.now, self.sleep)


GONE = Unavailable("connection refused")


def test_frames_ask_once_a_second() -> None:
    router = Router(status())
    shown = list(islice(router.frames(), 3))
    assert router.asked_s == pytest.approx([100, 100 + PERIOD_S, 100 + 2 * PERIOD_S])
    assert shown == [WatchFrame(status(), "", True)] * 3


def test_frames_report_lost_and_returned_router() -> None:
    router = Router(status(), GONE, GONE, LARGE)
    shown = list(islice(router.frames(), 12))
    assert (shown[1].content, shown[1].is_current) == (status(), False)
    assert shown[1].notice.startswith(f"no answer from {TARGET}") and "lost for 0 s" in shown[1].notice
    assert "lost for 1 s" in shown[2].notice
    back = f"{TARGET} answers again, after 2 s"
    assert [frame.notice for frame in shown[3:]] == [back] * int(NOTICE_S) + [""] * 4
    assert all(frame.is_current for frame in shown[3:])


def test_frame_without_router_has_no_figures() -> None:
    frame = next(Router(GONE).frames())
    (line,) = frame_lines(frame, 80)
    assert line.startswith(f"no answer from {TARGET}")


def test_frame_marks_old_figures() -> None:
    lines = frame_lines(WatchFrame(LARGE, "gone", False), 80)
    assert lines[:2] == ["gone", "The last figures:"]
    assert lines[2:] == frame_lines(WatchFrame(LARGE, "", True), 80)


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes `watch_status` ask this router, and Ctrl-C come after so many seconds."""

    def watch(router: Router, seconds: float) -> None:
        def sleep(pause_s: float) -> None:
            router.sleep(pause_s)
            if router.now >= 100 + seconds:
                raise KeyboardInterrupt

        clock: Any = type("Clock", (), {"monotonic": staticmethod(lambda: router.now), "sleep": staticmethod(sleep)})
        monkeypatch.setattr(baton.cli.status, "open_admin", lambda *_: FakeAdmin(status=router.snapshot))
        monkeypatch.setattr(baton.cli.status, "time", clock)

    return watch


def test_watch_status_ends_at_ctrl_c(watching: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    watching(Router(status()), 3)
    assert watch_status("host:1", as_json=False) == 0
    shown = capsys.readouterr()
    assert shown.out.count("2 requests running, 1 pending") == 3
    assert shown.err == ""


def test_watch_status_json_prints_object_per_second(
    watching: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    watching(Router(status(), GONE), 2)
    assert watch_status("host:1", as_json=True) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["active_requests"] == 3 and "latency" in first
    assert second["error"].startswith("no answer from host:1")


def test_watch_status_at_terminal_draws_in_place(
    watching: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    watching(Router(status()), 2)
    assert watch_status("host:1", as_json=False) == 0
    shown = capsys.readouterr().out
    assert shown.count("2 requests running, 1 pending") >= 2
    assert "\x1b[1A" in shown  # up, to draw over the frame before
    assert shown.endswith("\x1b[?25h")  # the cursor is back
