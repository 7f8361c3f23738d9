"""GLM-4.5 and later: function name, then keys and values between tags. Strings are verbatim, other values are JSON.

<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Rome</arg_value>
<arg_key>days</arg_key>
<arg_value>3</arg_value>
</tool_call>
"""

from baton.text.output.formats.reader import NAME
from baton.text.output.formats.tagged import TaggedReader
from baton.text.output.pieces import Schemas

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


class GlmReader(TaggedReader):
    key_tag, value_end, last_tag = KEY, VALUE_END, CLOSE

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas, OPEN)

    def _text(self) -> bool:
        if self._say_until((OPEN,)) is None:
            return False
        self._state = self._in_name
        return True

    def _in_name(self) -> bool:
        if not self._skip_space():
            return False
        found = NAME.match(self._held)
        if found is None:
            return self._no_call(OPEN)
        if found.end() == len(self._held):
            return False
        self._name, self._state = self._take(found.end()), self._next
        return True

    def _key(self) -> bool:
        """Parse an argument's key and the opening tag of its value."""
        key, tag, rest = self._held.partition(KEY_END)
        behind = rest.lstrip()
        if not tag or (not behind.startswith(VALUE) and VALUE.startswith(behind)):
            return False
        if not behind.startswith(VALUE):
            return self._give_up(OPEN)
        return self._begin_value(key, behind[len(VALUE) :])
