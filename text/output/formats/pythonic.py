"""Llama 4 and 3.2: calls in Python syntax, whose arguments are converted to JSON while they stream.

    [weather(city="Rome", days=3), time()]
    I look. <|python_start|>[weather(city="Rome")]<|python_end|>

Without the tag, an answer must consist only of calls of known functions; anything else is text.
"""

import json
import re

from baton.text.output.formats.reader import SPACE, FormatReader
from baton.text.output.pieces import Schemas
from baton.text.output.tool_calls import NotACall

OPEN, CLOSE = "<|python_start|>", "<|python_end|>"
TOKENS = frozenset({OPEN, CLOSE})
NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_CLOSERS = {"[": "]", "{": "}", "(": ")"}
_AS_JSON = {"]": "]", "}": "}", ")": "]"}  # JSON bracket by Python bracket; a tuple becomes a list


class PythonArguments:
    """Parser of the arguments after a function's name and opening bracket, character by character.

    Raises NotACall for Python that it does not support.
    """

    def __init__(self) -> None:
        self.closed = False
        self._open: list[str] = []  # closing brackets of the open lists, tuples and dicts
        self._read = self._key_or_end
        self._word = ""  # current key, number or constant
        self._quote = ""
        self._escape = ""  # current escape sequence, from its backslash
        self._is_empty = True  # whether there was no argument yet
        self._is_key = False  # whether the current string is a key of a dict

    def push(self, letter: str) -> str:
        """Parse one character and return the JSON that it adds."""
        return self._read(letter)

    # States between arguments:

    def _key_or_end(self, letter: str) -> str:
        if not self._word and letter in SPACE:
            return ""
        if not self._word and letter == ")":
            self.closed = True
            return "{}" if self._is_empty else "}"
        if letter == "=" and self._word:
            key, self._word, self._read = self._word.rstrip(SPACE), "", self._value
            begin, self._is_empty = "{" if self._is_empty else ", ", False
            return f"{begin}{json.dumps(key, ensure_ascii=False)}: "
        self._word += letter
        if not self._word.rstrip(SPACE).isidentifier():
            raise NotACall
        return ""

    def _behind(self, letter: str) -> str:
        """Parse what follows a value: a comma or a closing bracket."""
        if letter in SPACE:
            return ""
        if letter == ",":
            top = self._open[-1] if self._open else ""
            self._read = self._key_or_end if not top else self._dict_key if top == "}" else self._item
            self._word = ", " if top else ""  # separator before the next item; none before a closing bracket
            return ""
        return self._close(letter)

    def _close(self, letter: str) -> str:
        if not self._open and letter == ")":
            self.closed = True
            return "}"
        if not self._open or letter != self._open.pop():
            raise NotACall
        self._read = self._behind
        return _AS_JSON[letter]

    # States inside values:

    def _item(self, letter: str) -> str:
        """Parse an item of a list, or the end of the list."""
        if letter in SPACE:
            return ""
        comma, self._word = self._word, ""
        return self._close(letter) if letter == self._open[-1] else comma + self._value(letter)

    def _dict_key(self, letter: str) -> str:
        if letter in SPACE:
            return ""
        comma, self._word = self._word, ""
        if letter == "}":
            return self._close(letter)
        if letter not in "\"'":
            raise NotACall
        self._is_key = True
        return comma + self._value(letter)

    def _colon(self, letter: str) -> str:
        if letter in SPACE:
            return ""
        if letter != ":":
            raise NotACall
        self._read = self._value
        return ": "

    def _value(self, letter: str) -> str:
        if letter in SPACE:
            return ""
        if letter in "\"'":
            self._quote, self._read = letter, self._string
            return '"'
        if letter in _CLOSERS:
            self._open.append(_CLOSERS[letter])
            self._read = self._dict_key if letter == "{" else self._item
            return "{" if letter == "{" else "["
        if not (letter.isalnum() or letter == "-"):
            raise NotACall
        self._word, self._read = letter, self._constant
        return ""

    def _constant(self, letter: str) -> str:
        if letter.isalnum() or letter in "+-._":
            self._word += letter
            return ""
        word, self._word = self._word, ""
        json_text = word if _NUMBER.fullmatch(word) else _WORDS.get(word)
        if json_text is None:
            raise NotACall
        self._read = self._behind
        return json_text + self._behind(letter)

    def _string(self, letter: str) -> str:
        if self._escape:
            return self._in_escape(letter)
        if letter == "\\":
            self._escape = letter
            return ""
        if letter == self._quote:
            self._read, self._is_key = (self._colon if self._is_key else self._behind), False
            return '"'
        return _json_letters(letter)

    def _in_escape(self, letter: str) -> str:
        self._escape += letter
        kind, digits = self._escape[1], self._escape[2:]
        wanted = _HEX_DIGITS.get(kind, 0)
        if digits and letter not in "0123456789abcdefABCDEF":
            raise NotACall
        if len(digits) < wanted:
            return ""
        self._escape = ""
        if wanted:
            if (code := int(digits, 16)) > 0x10FFFF:
                raise NotACall
            return _json_letters(chr(code))
        # Python keeps the backslash of an escape that it does not know.
        return _json_letters(kind if kind in "\\'\"" else _ESCAPES.get(kind, "\\" + kind))


def _json_letters(text: str) -> str:
    """Return the text as characters of a JSON string. Half a surrogate pair is escaped."""
    return json.dumps(text, ensure_ascii=any("\ud800" <= letter <= "\udfff" for letter in text))[1:-1]


class PythonicReader(FormatReader):
    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._arguments = PythonArguments()
        self._name = ""

    def _text(self) -> bool:
        """Parse the beginning of the answer, or the text after a tag."""
        if not self._skip_space():
            return False
        if not self._held.startswith("["):
            return self._only_text()
        self._take(1)
        self._state = self._before_call
        return True

    def _before_call(self) -> bool:
        if not self._skip_space():
            return False
        found = NAME.match(self._held)
        if found is not None and found.end() == len(self._held):
            return False
        if found is None or self._held[found.end()] != "(" or found[0] not in self._schemas:
            return self._only_text()
        self._take(found.end() + 1)
        self._name, self._arguments, self._state = found[0], PythonArguments(), self._in_call
        return True

    def _in_call(self) -> bool:
        """Parse arguments. The call is sent with the first piece of its arguments."""
        text, self._held = self._held, ""
        for place, letter in enumerate(text):
            try:
                json_text = self._arguments.push(letter)
            except NotACall:
                self._held = text[place:]
                return self._only_text()
            self._raw += letter
            if json_text:
                if self._name:
                    self._begin(self._name)
                self._name = self._raw = ""
                self._argue(json_text)
            if self._arguments.closed:
                self._held, self._state = text[place + 1 :], self._behind
                return True
        return False

    def _behind(self) -> bool:
        if not self._skip_space():
            return False
        if self._held[0] not in ",]":
            return self._only_text()
        self._state = self._before_call if self._take(1) == "," else self._closed
        return True

    def _closed(self) -> bool:
        """Skip the text that closes the list."""
        if not self._skip_space() or (comes := self._comes(CLOSE)) is None:
            return False
        self._drop(CLOSE if comes else "")
        self._state = self._rest
        return True

    def _only_text(self) -> bool:
        """Treat the unsent part of the call and the remaining answer as text, without the tag."""
        if self._raw.startswith(OPEN):
            self._no_call(OPEN)
        self._held, self._raw, self._state = self._raw + self._held, "", self._rest
        return True

    def _rest(self) -> bool:
        if self._say_until((OPEN,)) is None:
            return False
        self._state = self._text
        return True

    def _end(self) -> None:
        if self._state == self._closed:
            self._raw = self._held = ""
