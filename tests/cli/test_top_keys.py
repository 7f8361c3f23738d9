"""Keys as a terminal sends them, and the terminal as it was before."""

import os
import pty
import signal
import termios
from collections.abc import Callable, Iterator

import pytest

from baton.cli.top.keys import Key, Keyboard, keys_in

WAIT_S = 10.0


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        (b"qjksp", [Key.QUIT, Key.DOWN, Key.UP, Key.SORT, Key.PAUSE]),
        (b"\x1b[A\x1b[B\x1bOA\x1bOB", [Key.UP, Key.DOWN, Key.UP, Key.DOWN]),
        (b"\r\n\x7f", [Key.ENTER, Key.ENTER, Key.BACK]),
        (b"xyz\xc3\xa4j", [Key.DOWN]),
        (b"\x1b[1;5Cq\x1b[5~j", [Key.QUIT, Key.DOWN]),
    ],
)
def test_keys_in_skips_unknown_keys(typed: bytes, keys: list[Key]) -> None:
    assert keys_in(typed) == (keys, b"")


@pytest.mark.parametrize("rest", [b"\x1b", b"\x1b[", b"\x1bO"])
def test_keys_in_returns_incomplete_key(rest: bytes) -> None:
    assert keys_in(b"j" + rest) == ([Key.DOWN], rest)


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """The side of the one who types, and that of the program."""
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def test_keyboard_reads_without_enter_and_echo(terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    keyboard = Keyboard(theirs)
    with keyboard.captured():
        os.write(ours, b"j")
        assert keyboard.read(WAIT_S) == [Key.DOWN]
        assert keyboard.read(0.0) == []
        os.set_blocking(ours, False)
        with pytest.raises(BlockingIOError):  # an echo would come back here
            os.read(ours, 10)


def test_keyboard_escape_is_back(terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    keyboard = Keyboard(theirs)
    with keyboard.captured():
        os.write(ours, b"\x1b")
        assert keyboard.read(WAIT_S) == [Key.BACK]


def test_keyboard_closed_terminal_is_quit() -> None:
    ours, theirs = pty.openpty()
    keyboard = Keyboard(theirs)
    os.close(ours)
    assert keyboard.read(WAIT_S) == [Key.QUIT]
    os.close(theirs)


def ends_well() -> None:
    pass


def fails() -> None:
    raise ValueError("a fault")


def is_terminated() -> None:
    signal.raise_signal(signal.SIGTERM)


def is_interrupted() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """As in a terminal: a background job of a script is started with SIGINT ignored."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("body", [ends_well, fails, is_terminated, is_interrupted])
def test_keyboard_restores_terminal_on_every_exit(terminal: tuple[int, int], body: Callable[[], None]) -> None:
    _, theirs = terminal
    before, handler = termios.tcgetattr(theirs), signal.getsignal(signal.SIGTERM)
    error: type[BaseException] | None = None
    try:
        with Keyboard(theirs).captured():
            assert termios.tcgetattr(theirs) != before
            body()
    except (ValueError, SystemExit, KeyboardInterrupt) as caught:
        error = type(caught)
    expected = {fails: ValueError, is_terminated: SystemExit, is_interrupted: KeyboardInterrupt}
    assert error is expected.get(body)
    assert termios.tcgetattr(theirs) == before
    assert signal.getsignal(signal.SIGTERM) is handler
