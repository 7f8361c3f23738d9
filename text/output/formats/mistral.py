"""Mistral: calls are a JSON list. Since version 11 of Mistral's tokenizers, each call is a name and a JSON object.

    [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}, "id": "9Ae3bDc2F"}]
    [TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]time[CALL_ID]9Ae3bDc2F[ARGS]{}

Mistral's chat templates accept only call ids of nine letters and digits.
"""

import secrets

from baton.text.output.formats.reader import NAME, SPACE, FormatReader
from baton.text.output.pieces import Schemas
from baton.text.output.tool_calls import CallObject, NotACall

OPEN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
TOKENS = frozenset({OPEN, CALL_ID, ARGUMENTS})


def mistral_id() -> str:
    return secrets.token_hex(5)[:9]


class MistralReader(FormatReader):
    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas, mistral_id)
        self._name = ""
        self._call = CallObject()

    def _text(self) -> bool:
        if self._say_until((OPEN,)) is None:
            return False
        self._state = self._behind_tag
        return True

    def _behind_tag(self) -> bool:
        """Parse the text after the tag: the beginning of a list, or a function's name."""
        if not self._skip_space():
            return False
        if self._held[0] in "[{":
            self._take(self._held[0] == "[")
            self._state = self._in_list
        elif (found := NAME.match(self._held)) is None:
            return self._no_call(OPEN)
        elif found.end() == len(self._held):
            return False
        else:
            self._name, self._state = self._take(found.end()), self._behind_name
        return True

    def _behind_name(self) -> bool:
        """Parse the text after a function's name: an optional call id, an optional tag, then the arguments."""
        if not self._skip_space():
            return False
        for tag in (CALL_ID, ARGUMENTS):
            if (comes := self._comes(tag)) is None:
                return False
            if comes:
                self._take(len(tag))
                self._state = self._call_id if tag == CALL_ID else self._behind_name
                return True
        if self._begin_object(self._name, OPEN):
            self._state = self._arguments
        return True

    def _call_id(self) -> bool:
        found = NAME.match(self._held)
        if found is None:
            return self._no_call(OPEN)
        if found.end() == len(self._held):
            return False
        self._take(found.end())
        self._state = self._behind_name
        return True

    def _arguments(self) -> bool:
        if not self._pass_object(OPEN):
            return False
        self._state = self._text
        return True

    def _in_list(self) -> bool:
        """Parse the separator before a call in the list, or the end of the list."""
        rest = self._held.lstrip(SPACE + ",")
        self._take(len(self._held) - len(rest))
        if not rest:
            return False
        if rest.startswith("{"):
            self._call, self._state = CallObject(), self._in_call
        elif rest.startswith("]") and not self._raw.startswith(OPEN):
            self._drop("]")
            self._state = self._text
        else:
            return self._give_up(OPEN)
        return True

    def _in_call(self) -> bool:
        call = self._call
        try:
            self._pass_call(call)
        except NotACall:
            return self._give_up(OPEN)
        if call.closed:
            self._state = self._text if call.failed else self._in_list
        return True
