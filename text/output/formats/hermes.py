"""Hermes, Qwen2.5, Qwen3 and others: calls are JSON between tags.

I look.
<tool_call>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_call>
"""

from baton.text.output.formats.reader import FormatReader
from baton.text.output.pieces import Schemas
from baton.text.output.tool_calls import CallObject, NotACall

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesReader(FormatReader):
    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._call = CallObject()

    def _text(self) -> bool:
        if self._say_until((OPEN,)) is None:
            return False
        self._call, self._state = CallObject(), self._in_call
        return True

    def _in_call(self) -> bool:
        """Parse a call. Until the function's name is known, the call may turn out to be text."""
        call, begun = self._call, not self._raw
        for place, letter in enumerate(self._held):
            try:
                call.push(letter)
            except NotACall:
                self._take(place + 1)
                return self._no_call(OPEN)
            if call.closed:
                break
        self._take(place if call.failed else place + 1)
        if call.name is not None:
            if not begun:
                self._begin(call.name)
            self._raw = ""
            self._argue(call.take())
        if call.closed:
            self._state = self._text if call.failed else self._behind
        return True

    def _behind(self) -> bool:
        """Skip the closing tag, which a model may omit."""
        self._held = self._held.lstrip()
        if not self._held or (comes := self._comes(CLOSE)) is None:
            return False
        self._held, self._state = self._held[len(CLOSE) if comes else 0 :], self._text
        return True

    def _end(self) -> None:
        if self._state == self._behind:
            self._held = ""  # an incomplete closing tag is not text
