"""DeepSeek: calls between special tokens. V3 and R1 write the arguments in a block of code, V3.1 does not.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather
```json
{"city": "Rome"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>…
"""

from baton.text.output.formats.reader import NAME, SPACE, FormatReader
from baton.text.output.pieces import Schemas

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
FENCE = "```"
TOKENS = frozenset({CALLS, CALLS_END, CALL, CALL_END, SEPARATOR})


class DeepseekReader(FormatReader):
    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._tag = CALLS  # tag with which the current call, or list of calls, began
        self._name = ""

    def _text(self) -> bool:
        tag = self._say_until((CALLS, CALL))
        if tag is None:
            return False
        self._tag, self._state = tag, self._next if tag == CALLS else self._kind
        return True

    def _next(self) -> bool:
        """Parse the next call or the end of all calls."""
        if not self._skip_space():
            return False
        begins, ends = self._comes(CALL), self._comes(CALLS_END)
        if begins:
            self._take(len(CALL))
            self._state = self._kind
        elif begins is None or ends is None:
            return False
        elif ends and not self._raw.startswith(self._tag):
            self._drop(CALLS_END)
            self._state = self._text
        else:
            return self._give_up(self._tag)
        return True

    def _kind(self) -> bool:
        """Parse the text before the separator: in V3 and R1 the word `function`, in V3.1 the function's name."""
        found = NAME.match(self._held)
        behind = self._held[found.end() :] if found is not None else self._held
        if found is None or not (behind.startswith(SEPARATOR) or SEPARATOR.startswith(behind)):
            return self._give_up(self._tag)
        if not behind.startswith(SEPARATOR):
            return False
        self._name = self._take(found.end())
        self._take(len(SEPARATOR))
        self._state = self._behind_kind
        return True

    def _behind_kind(self) -> bool:
        """Parse the text after the separator: in V3.1 the arguments, in V3 and R1 the function's name."""
        if not self._skip_space():
            return False
        if self._held.startswith("{"):
            self._begin_object(self._name, self._tag)
            self._state = self._arguments
            return True
        found = NAME.match(self._held)
        if found is None:
            return self._give_up(self._tag)
        if found.end() == len(self._held):
            return False
        self._name, self._state = self._take(found.end()), self._fence
        return True

    def _fence(self) -> bool:
        opening = FENCE + "json"
        if not self._skip_space() or (comes := self._comes(opening)) is None:
            return False
        self._take(len(opening) if comes else 0)
        if not self._skip_space():
            return False
        if not self._held.startswith("{"):
            return self._give_up(self._tag)
        self._begin_object(self._name, self._tag)
        self._state = self._arguments
        return True

    def _arguments(self) -> bool:
        if not self._pass_object(CALL_END):
            return False
        self._state = self._behind
        return True

    def _behind(self) -> bool:
        self._held = self._held.lstrip(SPACE + "`")
        if not self._held or (comes := self._comes(CALL_END)) is None:
            return False
        self._drop(CALL_END if comes else "")
        self._state = self._next if comes else self._text
        return True

    def _end(self) -> None:
        if self._state == self._behind or (self._state == self._next and not self._raw.startswith(self._tag)):
            self._raw = self._held = ""  # an incomplete last tag is not text
