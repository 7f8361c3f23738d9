"""Base of readers for formats that write each argument as a key and a value between tags. Pure."""

from abc import abstractmethod
from typing import ClassVar

from baton.text.output.formats.reader import FormatReader
from baton.text.output.formats.values import ArgumentWriter
from baton.text.output.pieces import Schemas, beginning_of


class TaggedReader(FormatReader):
    """Reader that sends a call when its first key is complete, or at the end of a call without arguments."""

    key_tag: ClassVar[str]
    value_end: ClassVar[str]
    last_tag: ClassVar[str]
    """Tag after the arguments of a call."""
    line_break: ClassVar[str] = ""
    """Line break between a value and its closing tag, not part of the value; empty if there is none."""

    def __init__(self, schemas: Schemas, tag: str) -> None:
        """Start before the first call. `tag`: tag with which calls begin; `_text` may replace it."""
        super().__init__(schemas)
        self._name = ""
        self._tag = tag
        self._writer = ArgumentWriter({})

    @abstractmethod
    def _key(self) -> bool:
        """Parse the text between the first tag of an argument and its value."""

    def _closed(self) -> bool:
        """Parse the text after the last tag of a call."""
        return self._text()

    def _next(self) -> bool:
        """Parse the opening tag of the next argument, or the end of the call."""
        if not self._skip_space():
            return False
        is_key, is_last = self._comes(self.key_tag), self._comes(self.last_tag)
        if is_key:
            self._take(len(self.key_tag))
            self._state = self._key
        elif is_last:
            self._begin_named()
            self._drop(self.last_tag)
            self._argue(self._writer.end())
            self._state = self._closed
        elif is_key is None or is_last is None:
            return False
        else:
            return self._give_up(self._tag)
        return True

    def _begin_named(self) -> None:
        if self._raw.startswith(self._tag):
            self._begin(self._name)
            self._writer = ArgumentWriter(self._schemas.get(self._name, {}))

    def _begin_value(self, key: str, behind: str) -> bool:
        """Send a key, and parse its value next. `behind`: received text after the key."""
        self._begin_named()
        self._argue(self._writer.key(key.strip()))
        self._raw, self._held, self._state = "", behind, self._value
        return True

    def _value(self) -> bool:
        value, tag, rest = self._held.partition(self.value_end)
        if tag:
            value, self._held = value.removesuffix(self.line_break), rest
        else:
            certain = len(self._held) - beginning_of(self.value_end, self._held)
            if self.line_break and self._held[:certain].endswith(self.line_break):
                certain -= len(self.line_break)
            value, self._held = self._held[:certain], self._held[certain:]
        self._argue(self._writer.part(value))
        if tag:
            self._argue(self._writer.value_ends())
            self._state = self._next
        return bool(tag)

    def _end(self) -> None:
        if self._state == self._value:
            self._argue(self._writer.part(self._held) + self._writer.cut())
            self._held = ""
