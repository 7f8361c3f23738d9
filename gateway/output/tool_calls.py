"""A model's output, taken apart into text and function calls, while it comes. Pure.

Hermes and Qwen   text <tool_call>{"name": …, "arguments": …}</tool_call> …
Llama 3           {"name": …, "parameters": …}; {…}       the answer is calls, or is text
forced            [{"name": …, "parameters": …}, …], or the arguments of the one function that was named
"""

import json
import secrets
from collections.abc import Callable, Set
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"
OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


class NotACall(Exception):
    """The text is no function call; none of it has gone out."""


class _At(Enum):
    BEGIN = auto()  # before the brace
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    END = auto()


class CallObject:
    """Reads one call as JSON, a character at a time. Arguments go out as the model wrote them.

    {"name": "weather", "arguments": {"city": "Rome"}}        `parameters` is the same as `arguments`

    `name` is None until call and arguments have begun; then `fresh` has the new characters of the arguments.
    """

    def __init__(self) -> None:
        self.raw = ""  # everything that was read
        self.name: str | None = None
        self.fresh = ""  # arguments that have not been taken
        self.closed = False
        self._at = _At.BEGIN
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key = ""
        self._token = ""  # of the key or value that is being read
        self._said_name: str | None = None
        self._live = False  # the value being read is the arguments, and an object

    def push(self, letter: str) -> None:
        """Takes one character. Raises: NotACall, unless `name` has been reported."""
        self.raw += letter
        if self._in_string:
            self._take(letter)
            if self._escaped:
                self._escaped = False
            elif letter == "\\":
                self._escaped = True
            elif letter == '"':
                self._in_string = False
                if self._at is _At.KEY:
                    self._key, self._token, self._at = self._text(), "", _At.COLON
            return
        match self._at:
            case _At.BEGIN:
                if letter == "{":
                    self._at = _At.KEY
                elif letter not in _SPACE:
                    self._fail()
            case _At.KEY:
                self._begin_key(letter)
            case _At.COLON:
                if letter == ":":
                    self._at = _At.VALUE
                elif letter not in _SPACE:
                    self._fail()
            case _At.VALUE:
                self._read_value(letter)
            case _At.END:
                self._fail()

    def take(self) -> str:
        """The arguments that are new since the last call."""
        fresh, self.fresh = self.fresh, ""
        return fresh

    def _begin_key(self, letter: str) -> None:
        if letter == '"':
            self._in_string = True
            self._take(letter)
        elif letter == "}":
            self._close()
        elif letter not in (*_SPACE, ","):
            self._fail()

    def _read_value(self, letter: str) -> None:
        if self._depth == 0 and letter in ",}":
            self._end_value()
            if letter == "}":
                self._close()
            else:
                self._at = _At.KEY
            return
        if self._depth == 0 and letter in _SPACE:
            return
        if not self._token and letter == "{" and self._key in _ARGUMENTS and self._said_name is not None:
            self._live, self.name = True, self._said_name
        if letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
        self._in_string = letter == '"'
        self._take(letter)

    def _take(self, letter: str) -> None:
        self._token += letter
        if self._live:
            self.fresh += letter

    def _end_value(self) -> None:
        key, token, live = self._key, self._token, self._live
        self._key = self._token = ""
        self._live = False
        if key == "name":
            name = _parsed(token)
            if not isinstance(name, str) or not name:
                self._fail()
                return
            self._said_name = name
            if self.fresh:  # the arguments came first
                self.name = name
        elif key in _ARGUMENTS and not live:
            # A text holds JSON by itself; null is no arguments.
            value = _parsed(token)
            self.fresh += value if isinstance(value, str) else "{}" if value is None else token
            self.name = self._said_name

    def _close(self) -> None:
        self.closed, self._at = True, _At.END
        if self.name is None:
            if self._said_name is None:
                self._fail()
            self.name, self.fresh = self._said_name, self.fresh or "{}"

    def _text(self) -> str:
        text = _parsed(self._token)
        return text if isinstance(text, str) else ""

    def _fail(self) -> None:
        if self.name is None:
            raise NotACall
        self.closed = True


def _parsed(token: str) -> object:
    try:
        return json.loads(token)
    except ValueError:
        return token


_BETWEEN = _SPACE + ";,[]"


@dataclass(frozen=True, slots=True)
class CallBegins:
    """The `index`-th call of the answer."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallGoesOn:
    index: int
    arguments: str


Piece = str | CallBegins | CallGoesOn
"""A text is content of the answer."""


class ToolParser(Protocol):
    @property
    def calls(self) -> int:
        """Calls that have begun."""

    def push(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]:
        """The pieces that were held back, at the end of the answer."""


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class _Calls:
    """The parsers' common part: one call after another, reported as pieces."""

    def __init__(self) -> None:
        self.calls = 0
        self._call: CallObject | None = None
        self._begun = False

    def _open(self) -> CallObject:
        self._begun = False
        return CallObject()

    def _news(self, call: CallObject, known: Callable[[str], bool]) -> list[Piece]:
        """Raises: NotACall for a name that is not known."""
        pieces: list[Piece] = []
        if not self._begun and call.name is not None:
            if not known(call.name):
                raise NotACall
            self._begun = True
            self.calls += 1
            pieces.append(CallBegins(self.calls - 1, _new_id(), call.name))
        if self._begun and call.fresh:
            pieces.append(CallGoesOn(self.calls - 1, call.take()))
        return pieces


class HermesParser(_Calls):
    """Space around calls is no content."""

    def __init__(self) -> None:
        super().__init__()
        self._held = ""  # text that may begin a tag, or be space before one
        self._closing = False  # a call has ended, its closing tag has not come

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        self._held += text
        while self._held:
            before = len(self._held)
            pieces += self._read_call() if self._call is not None else self._read_text()
            if len(self._held) == before:
                break
        return pieces

    def finish(self) -> list[Piece]:
        call, self._call = self._call, None
        if call is not None and not self._begun:
            return [OPEN + call.raw]
        rest = self._held.rstrip() if self.calls else self._held
        return [rest] if rest and not self._closing else []

    def _read_text(self) -> list[Piece]:
        if self._closing:
            self._closing, self._held = self._after_close()
            if self._closing:
                return []
        content, tag, rest = self._held.partition(OPEN)
        if tag:
            self._call, self._held = self._open(), rest
            return [content.rstrip()] if content.strip() else []
        if self.calls:
            self._held = self._held.lstrip()
        certain = len(self._held) - _held_back(self._held)
        content, self._held = self._held[:certain], self._held[certain:]
        return [content] if content else []

    def _after_close(self) -> tuple[bool, str]:
        """Whether the closing tag is still to come, and the text behind it."""
        text = self._held.lstrip()
        if text.startswith(CLOSE):
            return False, text[len(CLOSE) :]
        return (CLOSE.startswith(text), text)

    def _read_call(self) -> list[Piece]:
        call = self._call
        if call is None:
            return []
        try:
            for place, letter in enumerate(self._held):
                call.push(letter)
                if call.closed:
                    self._held, self._call, self._closing = self._held[place + 1 :], None, True
                    return self._news(call, lambda name: True)
            self._held = ""
            return self._news(call, lambda name: True)
        except NotACall:
            self._held = self._held[place + 1 :]
            self._call = None
            return [OPEN + call.raw]


def _held_back(text: str) -> int:
    """Length of the end that may turn out not to be content: a beginning of the tag, with the space before it."""
    for length in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if text.endswith(OPEN[:length]):
            break
    else:
        length = 0
    kept = text[: len(text) - length]
    return len(text) - len(kept.rstrip())


class JsonParser(_Calls):
    """The whole answer is calls in JSON, or it is text; so is an object that calls no function that there is."""

    def __init__(self, names: Set[str]) -> None:
        super().__init__()
        self._names = names
        self._text = False  # it has turned out to be text
        self._before = ""  # between calls

    def push(self, text: str) -> list[Piece]:
        if self._text:
            return [text] if text else []
        pieces: list[Piece] = []
        for place, letter in enumerate(text):
            try:
                pieces += self._read(letter)
            except NotACall:
                self._text = True
                shown = self._before + (self._call.raw if self._call else letter) + text[place + 1 :]
                self._call = None
                return [*pieces, shown] if not self.calls else pieces
        return pieces

    def finish(self) -> list[Piece]:
        if self._text or self.calls:
            return []
        shown = self._before + (self._call.raw if self._call is not None else "")
        return [shown] if shown else []

    def _read(self, letter: str) -> list[Piece]:
        """Raises: NotACall."""
        if self._call is None:
            if letter == "{":
                self._call = self._open()
            elif letter in _BETWEEN or PYTHON_TAG.startswith(self._before.strip(_BETWEEN) + letter):
                self._before += letter
                return []
            else:
                raise NotACall
        call = self._call
        call.push(letter)
        pieces = self._news(call, self._names.__contains__) if call.name is not None else []
        if call.closed:
            self._call = None
        return pieces


class NamedParser:
    """Everything is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.calls = 0

    def push(self, text: str) -> list[Piece]:
        begin: list[Piece] = [] if self.calls else [CallBegins(0, _new_id(), self._name)]
        self.calls = 1
        return [*begin, CallGoesOn(0, text)] if text else begin

    def finish(self) -> list[Piece]:
        return [] if self.calls else self.push("")


class FirstCall:
    """One call at most: later calls of the other parser are dropped."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser

    @property
    def calls(self) -> int:
        return min(1, self._parser.calls)

    def push(self, text: str) -> list[Piece]:
        return self._first(self._parser.push(text))

    def finish(self) -> list[Piece]:
        return self._first(self._parser.finish())

    def _first(self, pieces: list[Piece]) -> list[Piece]:
        return [piece for piece in pieces if isinstance(piece, str) or piece.index == 0]
