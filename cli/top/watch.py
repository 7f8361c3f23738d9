"""Draw the view at a terminal each second and after each key; elsewhere print it once (`baton top`)."""

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from baton.cli.connection import admin_client, open_admin
from baton.cli.status import PERIOD_S, TIMEOUT_S, WatchFrame, frames
from baton.cli.top.keys import Key, Keyboard
from baton.cli.top.screen import Screen, View, pressed, screen_of
from baton.cli.top.snapshot import SeveralRouters, Snapshot, Snapshots


def show_top(admin_target: str, once: bool) -> int:
    """Show the view until q or Ctrl-C, or print one frame; return 0. Raises: CommandFailed if that frame is missing."""
    console = Console()
    if once or console.is_dumb_terminal or not (console.is_terminal and sys.stdin.isatty()):
        return _show_once(admin_target, console)
    with ExitStack() as opened:
        admins = [opened.enter_context(open_admin(each, TIMEOUT_S)) for each in admin_target.split(",")]
        session = TopSession(console, Keyboard(sys.stdin.fileno()))
        snapshots = Snapshots(SeveralRouters(admins), time.monotonic, lambda: session.view.opened_id)
        try:
            session.run(snapshots.take, f"{admin_target} (admin port)")
        except (KeyboardInterrupt, Quit):
            return 0
    return 0


def _show_once(admin_target: str, console: Console) -> int:
    """Print one frame of two snapshots a second apart, since rates need two."""
    with ExitStack() as opened:
        admins = [opened.enter_context(admin_client(each)) for each in admin_target.split(",")]
        snapshots = Snapshots(SeveralRouters(admins), time.monotonic)
        snapshots.take()
        time.sleep(PERIOD_S)
        snapshot = snapshots.take()
    for line in screen_of(WatchFrame(snapshot, "", is_current=True), View(), console.width, None, has_keys=False).lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0


class Keys(Protocol):
    def captured(self) -> AbstractContextManager[None]: ...
    def read(self, wait_s: float) -> list[Key]: ...


class Quit(Exception):
    """Raised when the user presses q."""


@dataclass(slots=True)
class TopSession:
    """Session of a user with `baton top` at a terminal."""

    console: Console
    keyboard: Keys
    view: View = field(default_factory=View)
    _frame: WatchFrame[Snapshot] = field(default_factory=lambda: WatchFrame(None, "asking the router", is_current=True))

    def run(self, take: Callable[[], Snapshot], target: str) -> None:
        """Draw frames until the user quits. Raises: Quit."""
        with self.keyboard.captured(), Live(console=self.console, screen=True, auto_refresh=False) as live:

            def wait(seconds: float) -> None:
                self._wait(seconds, live)

            self._draw(live)
            for self._frame in frames(take, target, time.monotonic, wait):
                self._draw(live)

    def _wait(self, seconds: float, live: Live) -> None:
        """Handle keys for `seconds`, longer while paused. Return early when a request is opened, to fetch its data."""
        ends_s = time.monotonic() + seconds
        while True:
            left_s = PERIOD_S if self.view.is_paused else max(0.0, ends_s - time.monotonic())
            keys = self.keyboard.read(left_s)
            before = self.view.opened_id
            for key in keys:
                if key is Key.QUIT:
                    raise Quit
                snapshot = self._frame.content
                self.view = pressed(self.view, key, snapshot.requests if snapshot is not None else ())
            if keys:
                self._draw(live)
            if self.view.is_paused:
                continue
            if (self.view.opened_id and self.view.opened_id != before) or time.monotonic() >= ends_s:
                return

    def _draw(self, live: Live) -> None:
        width, height = self.console.size
        live.update(drawn(screen_of(self._frame, self.view, width, height)), refresh=True)


def drawn(screen: Screen) -> Text:
    """Return the screen as text that is cropped at the terminal's edge."""
    text = Text(no_wrap=True, overflow="crop")
    for at, line in enumerate(screen.lines):
        text.append(line + "\n" * (at + 1 < len(screen.lines)), style="reverse" if at == screen.chosen else "")
    return text
