"""Llama 3: the complete answer is either text or calls in JSON. Forced calls have the same format.

    {"name": "weather", "parameters": {"city": "Rome"}}; {"name": "time", "parameters": {}}
    <|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}
    [{"name": "weather", "parameters": {"city": "Rome"}}, {"name": "time", "parameters": {}}]

A JSON object that calls no known function is text, since the user may have asked for JSON.
"""

from baton.text.output.formats.reader import SPACE, FormatReader
from baton.text.output.pieces import Schemas
from baton.text.output.tool_calls import CallObject, NotACall

PYTHON_TAG = "<|python_tag|>"
TOKENS = frozenset({PYTHON_TAG})
_BETWEEN = SPACE + ";,[]"


class LlamaReader(FormatReader):
    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._call = CallObject()

    def _text(self) -> bool:
        """Skip separators and an optional tag before a call. Anything else there makes the answer text."""
        rest = self._held.lstrip(_BETWEEN)
        self._take(len(self._held) - len(rest))
        if not rest or (tagged := self._comes(PYTHON_TAG)) is None:
            return False
        if tagged:
            self._take(len(PYTHON_TAG))
        elif rest.startswith("{"):
            self._call, self._state = CallObject(), self._in_call
        else:
            self._only_text()
        return True

    def _in_call(self) -> bool:
        call = self._call
        try:
            self._pass_call(call, self._schemas)
        except NotACall:
            return self._only_text()
        if call.failed:
            self._only_text()
        elif call.closed:
            self._state = self._text
        return True

    def _only_text(self) -> bool:
        """Treat the remaining answer as text, including all white space."""
        self._held, self._raw, self._state = self._raw + self._held, "", self._rest
        return True

    def _rest(self) -> bool:
        self._say(self._held)
        self._held = ""
        return True

    def _end(self) -> None:
        if self._state == self._text and self.calls and not self._raw.strip(_BETWEEN):
            self._raw = ""  # the end of a list of calls is not text
