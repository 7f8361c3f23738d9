"""Parsers of function calls in JSON while they stream, and of answers that are one call. Pure."""

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

from baton.text.output.pieces import CallArguments, CallStart, OutputPiece, Piece, ToolParser, new_id
from baton.text.structured.json_text import JsonRefused, read_arguments, read_json

_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class NotACall(Exception):
    """Error: the text is not a function call. Nothing of the text was sent."""


class _JsonState(Enum):
    BEGIN = auto()  # before the opening brace
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    END = auto()


class CallObject:
    """Parser of one call in JSON, character by character. Arguments are not reformatted.

    {"name": "weather", "arguments": {"city": "Rome"}}        `parameters` is a synonym of `arguments`

    `name` is None until the call and its arguments have begun; then `fresh` has the new characters of the arguments.
    """

    def __init__(self) -> None:
        self.raw = ""  # text parsed so far
        self.name: str | None = None
        self.fresh = ""  # new characters of the arguments, until `take`
        self.closed = False
        self.failed = False  # whether the last character made the call invalid; it is not part of the call
        self._at = _JsonState.BEGIN
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key = ""
        self._token = ""  # current key or value
        self._said_name: str | None = None
        self._live = False  # whether the current value is the arguments, as an object

    def push(self, letter: str) -> None:
        """Parse one character. If the text is not a call: set `failed` if `name` is set, otherwise raise NotACall."""
        self.raw += letter
        if self._in_string:
            self._take(letter)
            if self._escaped:
                self._escaped = False
            elif letter == "\\":
                self._escaped = True
            elif letter == '"':
                self._in_string = False
                if self._at is _JsonState.KEY:
                    self._key, self._token, self._at = self._text(), "", _JsonState.COLON
            return
        match self._at:
            case _JsonState.BEGIN:
                if letter == "{":
                    self._at = _JsonState.KEY
                elif letter not in _SPACE:
                    self._fail()
            case _JsonState.KEY:
                self._begin_key(letter)
            case _JsonState.COLON:
                if letter == ":":
                    self._at = _JsonState.VALUE
                elif letter not in _SPACE:
                    self._fail()
            case _JsonState.VALUE:
                self._read_value(letter)
            case _JsonState.END:
                self._fail()

    def take(self) -> str:
        """Return the characters of the arguments since the last `take`."""
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
                self._at = _JsonState.KEY
            return
        if self._depth == 0 and letter in _SPACE:
            return
        if self._depth == 0 and self._live and self._token:  # text directly after the arguments
            self._fail()
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
            if self.fresh and self.name is None:  # the arguments preceded the name
                self.name = name
        elif key in _ARGUMENTS and not live:
            # The arguments may be a string that contains JSON; null means that there are none.
            value = _parsed(token)
            self.fresh += value if isinstance(value, str) else "{}" if value is None else token
            self.name = self._said_name

    def _close(self) -> None:
        self.closed, self._at = True, _JsonState.END
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
        self.closed = self.failed = True


def _parsed(token: str) -> object:
    try:
        return read_json(token)
    except JsonRefused:
        return token


def arguments_object(written: str) -> dict[str, Any]:
    """Return the arguments as an object. Text that is not a JSON object becomes the argument `_raw`."""
    arguments = read_arguments(written or "{}")
    return {"_raw": written} if arguments is None else arguments


class NamedParser:
    """Parser for an answer that consists of the arguments of one function call."""

    thinks: bool | None = None

    def __init__(self, name: str) -> None:
        self._name = name
        self.calls = 0

    def push(self, text: str) -> list[Piece]:
        begin: list[Piece] = [] if self.calls else [CallStart(0, new_id(), self._name)]
        self.calls = 1
        return [*begin, CallArguments(0, text)] if text else begin

    def finish(self) -> list[Piece]:
        return [] if self.calls else self.push("")


class FirstCall:
    """Parser that drops all calls but the first."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser

    @property
    def calls(self) -> int:
        return min(1, self._parser.calls)

    @property
    def thinks(self) -> bool | None:
        return self._parser.thinks

    def push(self, text: str) -> list[OutputPiece]:
        return self._first(self._parser.push(text))

    def finish(self) -> list[OutputPiece]:
        return self._first(self._parser.finish())

    def _first(self, pieces: Sequence[OutputPiece]) -> list[OutputPiece]:
        return [piece for piece in pieces if not isinstance(piece, CallStart | CallArguments) or piece.index == 0]


class CallsOrForm:
    """Parser for an answer of calls or of structured output. If it does not begin with a call, tags in it are text."""

    def __init__(self, parser: ToolParser, begins: Sequence[str]) -> None:
        """Wrap `parser`. `begins`: tags with which calls begin; empty if `parser` decides itself what is a call."""
        self._parser = parser
        self._begins = begins
        self._held = ""  # beginning that may still be calls or structured output
        self._is_form: bool | None = None if begins else False

    @property
    def calls(self) -> int:
        return self._parser.calls

    @property
    def thinks(self) -> bool | None:
        return self._parser.thinks

    def push(self, text: str) -> Sequence[OutputPiece]:
        if self._is_form is None:
            self._held += text
            begun = self._held.lstrip()
            if not begun or (
                (found := [tag for tag in self._begins if tag.startswith(begun[: len(tag)])])
                and all(len(begun) < len(tag) for tag in found)
            ):
                return []
            self._is_form, text, self._held = not found, self._held if found else begun, ""
        if self._is_form:
            return [text] if text else []
        return self._parser.push(text)

    def finish(self) -> Sequence[OutputPiece]:
        return [self._held] if self._held else self._parser.finish()
