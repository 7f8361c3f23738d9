"""gpt-oss: messages in channels, including reasoning and calls. The prompt ends with `<|start|>assistant`.

    <|channel|>analysis<|message|>I need the weather.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>

    <|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>

`analysis` is reasoning. `final`, and `commentary` without a recipient, is text for the user. The recipient is before or
after the channel. Consecutive messages of one kind are paragraphs.
"""

import re

from baton.text.output.formats.reader import SPACE, FormatReader
from baton.text.output.pieces import Schemas

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN, CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
TOKENS = frozenset({START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN})
HEADER_CHARACTERS = 400  # maximum characters of a message's header; a longer text is no header
PARAGRAPH = "\n\n"
_FIRST = (START, CHANNEL, "to=", MESSAGE)  # possible beginnings of a header
_ENDS = (END, CALL, RETURN, START, CHANNEL)
_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?(?:\s*to=(?P<first>[^\s<]+))?\s*"
    r"(?:<\|channel\|>(?P<channel>\w+)(?:\s*to=(?P<second>[^\s<]+))?)?"
    r"\s*(?:<\|constrain\|>)?\s*\w*\s*"
)
_FUNCTIONS = "functions."


class HarmonyReader(FormatReader):
    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._name = ""
        self._in_thought = False
        self._has_thought = self._has_text = False
        self._gap = ""  # separator before the text of a message

    @property
    def thinks(self) -> bool:
        return self._in_thought

    def _text(self) -> bool:
        """Parse the header of a message."""
        begun = self._held.lstrip(SPACE)
        if not any(begun.startswith(tag) or tag.startswith(begun) for tag in _FIRST):
            return self._loose()
        place = begun.find(MESSAGE)
        if place < 0 and len(begun) < HEADER_CHARACTERS and not any(end in begun for end in (END, CALL, RETURN)):
            return False
        header = _HEADER.fullmatch(begun[:place]) if 0 <= place < HEADER_CHARACTERS else None
        if header is None:
            return self._loose()
        self._held = begun
        self._take(place + len(MESSAGE))
        self._begin_message(header["channel"] or "", header["second"] or header["first"] or "")
        return True

    def _begin_message(self, channel: str, recipient: str) -> None:
        self._name = recipient.removeprefix(_FUNCTIONS)
        if recipient.startswith(_FUNCTIONS) or recipient in self._schemas:
            self._in_thought, self._state = False, self._before_arguments
            return
        self._raw = ""
        self._in_thought = channel == "analysis"
        self._state = self._thought if self._in_thought else self._message
        has_some = self._has_thought if self._in_thought else self._has_text
        self._gap = PARAGRAPH if has_some else ""

    def _loose(self) -> bool:
        """Treat text without a header as a message: send its first character, and parse the rest in `_message`."""
        self._say(self._held[0])
        self._held, self._has_text, self._gap = self._held[1:], True, ""
        self._in_thought, self._state = False, self._message
        return True

    def _thought(self) -> bool:
        place, tag = self._find(_ENDS)
        text, self._held = self._held[:place], self._held[place:]
        if text:
            self._think(self._gap + text)
            self._gap, self._has_thought = "", True
        return self._ends_with(tag)

    def _message(self) -> bool:
        place, tag = self._find(_ENDS)
        text, self._held = self._held[:place], self._held[place:]
        if text:
            self._say(self._gap + text)
            self._gap, self._has_text = "", True
        return self._ends_with(tag)

    def _before_arguments(self) -> bool:
        if not self._skip_space():
            return False
        if self._held.startswith("{"):
            self._begin_object(self._name, "")
            self._state = self._arguments
            return True
        place, tag = self._find(_ENDS)
        if tag is None and not place:
            return False
        if place:  # text that is not an object: not a call
            self._say(self._raw)
            self._raw, self._gap, self._state = "", "", self._message
            return True
        self._begin(self._name)
        self._argue("{}")
        return self._ends_with(tag)

    def _arguments(self) -> bool:
        if not self._pass_object(*_ENDS):
            return False
        self._gap, self._state = "", self._message
        return True

    def _ends_with(self, tag: str | None) -> bool:
        """End a message at `tag`, which may also begin the next message; return False without a tag."""
        if tag is None:
            return False
        self._drop(tag if tag in (END, CALL, RETURN) else "")
        self._state = self._text
        return True
