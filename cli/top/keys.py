"""Keys pressed at a terminal."""

import os
import re
import select
import signal
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from types import FrameType

PART_S = 0.05  # wait for the further bytes of a key that begins with the byte of Escape
_BYTES = 64


class Key(Enum):
    QUIT = auto()
    UP = auto()
    DOWN = auto()
    ENTER = auto()
    BACK = auto()
    SORT = auto()
    PAUSE = auto()


_KEYS = {
    b"q": Key.QUIT,
    b"k": Key.UP,
    b"j": Key.DOWN,
    b"\r": Key.ENTER,
    b"\n": Key.ENTER,
    b"s": Key.SORT,
    b"p": Key.PAUSE,
    b"\x7f": Key.BACK,
    b"\x1b[A": Key.UP,
    b"\x1b[B": Key.DOWN,
    b"\x1bOA": Key.UP,
    b"\x1bOB": Key.DOWN,
}
_ESCAPE = b"\x1b"
_KEY = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.|[^\x1b]", re.DOTALL)
_INCOMPLETE = re.compile(rb"\x1b(\[[0-?]*|O)?\Z")


def keys_in(typed: bytes) -> tuple[list[Key], bytes]:
    """Return the known keys, and the bytes of an incomplete one at the end."""
    rest = _INCOMPLETE.search(typed)
    complete = typed if rest is None else typed[: rest.start()]
    return [_KEYS[key] for key in _KEY.findall(complete) if key in _KEYS], b"" if rest is None else rest[0]


class Keyboard:
    """Terminal without echo and line buffering. Ctrl-C still interrupts."""

    def __init__(self, terminal: int) -> None:
        """Create a keyboard. `terminal`: file descriptor."""
        self._terminal = terminal

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Turn off echo and line buffering; restore the terminal at the end, also at SIGTERM and SIGHUP."""
        before = termios.tcgetattr(self._terminal)
        handlers = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
        try:
            tty.setcbreak(self._terminal)
            yield
        finally:
            # Discard unread keys, which are not meant for the shell.
            termios.tcsetattr(self._terminal, termios.TCSAFLUSH, before)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def read(self, wait_s: float) -> list[Key]:
        """Wait up to `wait_s` for keys; return QUIT if the terminal is gone."""
        if not self._is_readable(wait_s):
            return []
        keys, rest = list[Key](), b""
        while True:
            try:
                typed = os.read(self._terminal, _BYTES)
            except OSError:  # the terminal has hung up
                typed = b""
            if not typed:
                return [*keys, Key.QUIT]
            more, rest = keys_in(rest + typed)
            keys += more
            if not rest:
                return keys
            if not self._is_readable(PART_S):
                return [*keys, Key.BACK] if rest == _ESCAPE else keys

    def _is_readable(self, wait_s: float) -> bool:
        return bool(select.select([self._terminal], [], [], wait_s)[0])


def _leave(number: int, frame: FrameType | None) -> None:
    """Exit with the code that shells use for the signal."""
    raise SystemExit(128 + number)
