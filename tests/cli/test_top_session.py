"""When `baton top` asks the router, and when it does not."""

from contextlib import AbstractContextManager, nullcontext
from io import StringIO

import pytest
from rich.console import Console

from baton.cli.top.keys import Key
from baton.cli.top.snapshot import Snapshot
from baton.cli.top.watch import Quit, TopSession
from tests.fixtures.snapshots import RUNNING, SNAPSHOT


class Keyboard:
    """Keys that come one after another, with nothing between them, whatever the time is; then q."""

    def __init__(self, *keys: Key | None) -> None:
        self._keys = [*keys, Key.QUIT]
        self.waits_s: list[float] = []

    def captured(self) -> AbstractContextManager[None]:
        return nullcontext()

    def read(self, wait_s: float) -> list[Key]:
        self.waits_s.append(wait_s)
        key = self._keys.pop(0)
        return [] if key is None else [key]


def looks(*keys: Key | None) -> list[str]:
    """The request that was open, at each snapshot that was taken until the end."""
    taken: list[str] = []
    console = Console(file=StringIO(), force_terminal=True, width=80, height=24)
    session = TopSession(console, Keyboard(*keys))

    def take() -> Snapshot:
        taken.append(session.view.opened_id)
        return SNAPSHOT

    with pytest.raises(Quit):
        session.run(take, "host:1")
    return taken


def test_session_key_needs_no_snapshot() -> None:
    assert looks(Key.DOWN, Key.SORT, Key.DOWN) == [""]


def test_session_paused_takes_no_snapshot() -> None:
    assert looks(Key.PAUSE, *[None] * 9) == [""]


def test_session_opened_request_is_fetched_immediately() -> None:
    assert looks(Key.ENTER, None) == ["", RUNNING.request_id]


def test_session_paused_open_request_is_not_fetched() -> None:
    assert looks(Key.PAUSE, Key.ENTER, None) == [""]
