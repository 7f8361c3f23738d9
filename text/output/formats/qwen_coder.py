"""Qwen3-Coder: functions and parameters are tags. A value is verbatim, between line breaks.

    <tool_call>
    <function=weather>
    <parameter=city>
    Rome
    </parameter>
    </function>
    </tool_call>

The first tag is sometimes missing.
"""

from baton.text.output.formats.reader import NAME
from baton.text.output.formats.tagged import TaggedReader
from baton.text.output.pieces import Schemas

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


class QwenCoderReader(TaggedReader):
    key_tag, value_end, last_tag, line_break = PARAMETER, PARAMETER_END, FUNCTION_END, "\n"

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas, OPEN)

    def _text(self) -> bool:
        tag = self._say_until((OPEN, FUNCTION))
        if tag is None:
            return False
        self._tag, self._state = tag, self._open if tag == OPEN else self._in_name
        return True

    def _open(self) -> bool:
        if not self._skip_space() or (comes := self._comes(FUNCTION)) is None:
            return False
        if not comes:
            return self._no_call(OPEN)
        self._take(len(FUNCTION))
        self._state = self._in_name
        return True

    def _in_name(self) -> bool:
        found = NAME.match(self._held)
        if found is None or (found.end() < len(self._held) and self._held[found.end()] != ">"):
            return self._no_call(self._tag)
        if found.end() == len(self._held):
            return False
        self._name, self._state = self._take(found.end()), self._next
        self._take(1)
        return True

    def _key(self) -> bool:
        """Parse a parameter's name and the line break after it."""
        key, tag, rest = self._held.partition(">")
        return bool(tag and rest) and self._begin_value(key, rest.removeprefix("\n"))

    def _closed(self) -> bool:
        """Skip the tag around the function, which a model may omit."""
        if not self._skip_space() or (comes := self._comes(CLOSE)) is None:
            return False
        self._drop(CLOSE if comes else "")
        self._state = self._text
        return True

    def _end(self) -> None:
        if self._state == self._closed:
            self._raw = self._held = ""  # an incomplete last tag is not text
        super()._end()
