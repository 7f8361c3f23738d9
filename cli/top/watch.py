"""`baton top` at a terminal: looks each second, keys at once. Elsewhere one frame."""

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from baton.cli.connection import admin_client, admin_key
from baton.cli.status import PERIOD_S, TIMEOUT_S, Frame, frames
from baton.cli.top.keys import Key, Keyboard
from baton.cli.top.look import Look, Looks
from baton.cli.top.screen import Screen, View, pressed, screen_of
from baton.client import AdminClient, RetryPolicy


def show_top(admin_target: str, once: bool) -> int:
    """Ends with exit code 0 at q and Ctrl-C. Raises: CommandFailed where one frame is asked for and none can be had."""
    console = Console()
    if once or console.is_dumb_terminal or not (console.is_terminal and sys.stdin.isatty()):
        return _show_once(admin_target, console)
    retry, key = RetryPolicy(attempts=1), admin_key(admin_target)
    with AdminClient(admin_target, retry=retry, timeout_s=TIMEOUT_S, api_key=key) as admin:
        session = Session(console, Keyboard(sys.stdin.fileno()))
        looks = Looks(admin, time.monotonic, lambda: session.view.opened_id)
        try:
            session.run(looks.take, f"{admin_target} (admin port)")
        except (KeyboardInterrupt, Quit):
            return 0
    return 0


def _show_once(admin_target: str, console: Console) -> int:
    """From two looks a second apart, since rates need two."""
    with admin_client(admin_target) as admin:
        looks = Looks(admin, time.monotonic)
        looks.take()
        time.sleep(PERIOD_S)
        look = looks.take()
    for line in screen_of(Frame(look, "", is_current=True), View(), console.width, None, has_keys=False).lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0


class Keys(Protocol):
    def taken(self) -> AbstractContextManager[None]: ...
    def read(self, wait_s: float) -> list[Key]: ...


class Quit(Exception):
    """The user asked for the end."""


@dataclass(slots=True)
class Session:
    """A user at a terminal."""

    console: Console
    keyboard: Keys
    view: View = field(default_factory=View)
    _frame: Frame[Look] = field(default_factory=lambda: Frame(None, "asking the router", is_current=True))

    def run(self, take: Callable[[], Look], target: str) -> None:
        """Raises: Quit; there is no other end."""
        with self.keyboard.taken(), Live(console=self.console, screen=True, auto_refresh=False) as live:

            def wait(seconds: float) -> None:
                self._wait(seconds, live)

            self._draw(live)
            for self._frame in frames(take, target, time.monotonic, wait):
                self._draw(live)

    def _wait(self, seconds: float, live: Live) -> None:
        """Until then, for as long as it is paused, or until a request is opened, whose stalls are asked for at once."""
        ends_s = time.monotonic() + seconds
        while True:
            left_s = PERIOD_S if self.view.is_paused else max(0.0, ends_s - time.monotonic())
            keys = self.keyboard.read(left_s)
            before = self.view.opened_id
            for key in keys:
                if key is Key.QUIT:
                    raise Quit
                look = self._frame.content
                self.view = pressed(self.view, key, look.requests if look is not None else ())
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
    """Lines that are too long for the terminal end at its edge."""
    text = Text(no_wrap=True, overflow="crop")
    for at, line in enumerate(screen.lines):
        text.append(line + "\n" * (at + 1 < len(screen.lines)), style="reverse" if at == screen.chosen else "")
    return text
