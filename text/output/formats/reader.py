"""What the readers of all formats share: text, white space around calls, and calls that turn out to be none. Pure.

What a reader says depends on the text alone, never on where it was cut: while the text so far allows two readings, a
state waits. A call goes out once its name and the beginning of its arguments are there. What is no call is text; where
arguments were already on their way, the text begins after them.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from baton.text.output.pieces import (
    CallArguments,
    CallStart,
    OutputPiece,
    Schemas,
    Thought,
    beginning_of,
    new_id,
)

SPACE = " \t\r\n"
NAME = re.compile(r"[A-Za-z0-9_.\-]+")
"""Of a function."""


class FormatReader(ABC):
    """Reads an answer as states do: each takes what it can of `_held`, and returns whether it got anywhere."""

    def __init__(self, schemas: Schemas, new_call_id: Callable[[], str] = new_id) -> None:
        self.calls = 0
        self._schemas = schemas
        self._new_call_id = new_call_id
        self._held = ""  # not read yet
        self._raw = ""  # of a call that has not gone out: what it is as text
        self._space = ""  # behind a text; it is none if a call follows
        self._behind_call = False  # white space that comes now is no text
        self._pieces: list[OutputPiece] = []
        self._state: Callable[[], bool] = self._text
        self._object = ObjectEnd()

    @property
    def thinks(self) -> bool | None:
        """Whether what comes now is a thought; None in a format that has no thoughts of its own."""
        return None

    def push(self, text: str) -> list[OutputPiece]:
        self._held += text
        while self._held and self._state():
            pass
        return self._told()

    def finish(self) -> list[OutputPiece]:
        """The pieces that were held back, at the end of the answer."""
        self._end()
        rest, self._raw, self._held = self._raw + self._held, "", ""
        self._say(rest)
        if self._space and not self.calls:
            self._pieces.append(self._space)
        return self._told()

    @abstractmethod
    def _text(self) -> bool:
        """The first state, and the one between calls."""

    def _end(self) -> None:  # noqa: B027, most have nothing to settle
        """Whatever the end of the answer settles. What is left as raw or held is text."""

    # What goes out.

    def _say(self, text: str) -> None:
        if self._behind_call:
            text = text.lstrip(SPACE)
        kept = text.rstrip(SPACE)
        if not kept:
            self._space += text
            return
        self._pieces.append(self._space + kept)
        self._space, self._behind_call = text[len(kept) :], False

    def _think(self, text: str) -> None:
        if text:
            self._pieces.append(Thought(text))

    def _begin(self, name: str) -> None:
        self._pieces.append(CallStart(self.calls, self._new_call_id(), name))
        self.calls += 1
        self._raw = self._space = ""
        self._behind_call = True

    def _argue(self, arguments: str) -> None:
        if arguments:
            self._pieces.append(CallArguments(self.calls - 1, arguments))

    def _no_call(self, tag: str) -> bool:
        """What began with `tag` is none: the tag is text, and what follows it is read once more."""
        self._held = self._raw[len(tag) :] + self._held
        self._raw, self._state = "", self._text
        self._say(tag)
        return True

    def _give_up(self, tag: str) -> bool:
        """The call goes no further: where it has not gone out it is none, else what follows is text."""
        if self._raw.startswith(tag):
            return self._no_call(tag)
        self._held, self._raw, self._state = self._raw + self._held, "", self._text
        return True

    def _begin_object(self, name: str, tag: str) -> bool | None:
        """A call whose arguments come next, as an object. None while that is open; else whether it has gone out."""
        if not self._skip_space():
            return None
        if not self._held.startswith("{"):
            self._no_call(tag)
            return False
        self._begin(name)
        self._object = ObjectEnd()
        return True

    def _pass_object(self, *ends: str) -> bool:
        """Arguments as they come. Returns whether the object has ended, or one of `ends` is next: no object has it."""
        place, tag = self._find(ends)
        passed = self._object.read(self._held[:place])
        self._argue(self._held[:passed])
        self._held = self._held[passed:]
        return self._object.has_ended or tag is not None

    # What comes in.

    def _comes(self, tag: str) -> bool | None:
        """Whether it comes next; None while that is open."""
        if self._held.startswith(tag):
            return True
        return None if tag.startswith(self._held) else False

    def _take(self, characters: int) -> str:
        """Of a call: it stays known until the call goes out."""
        taken, self._held = self._held[:characters], self._held[characters:]
        self._raw += taken
        return taken

    def _drop(self, tag: str) -> None:
        """Takes it, and all that was taken of the call so far."""
        self._held, self._raw = self._held[len(tag) :], ""

    def _skip_space(self) -> bool:
        """Whether something else than white space is there."""
        self._take(len(self._held) - len(self._held.lstrip(SPACE)))
        return bool(self._held)

    def _say_until(self, tags: Sequence[str]) -> str | None:
        """Text up to the first tag, which it takes and returns; None while there is none."""
        place, tag = self._find(tags)
        self._say(self._held[:place])
        self._held = self._held[place:]
        return self._take(len(tag)) if tag is not None else None

    def _find(self, tags: Sequence[str]) -> tuple[int, str | None]:
        """Where the first of the tags begins; without one, where one may begin at the earliest."""
        found = min(((place, tag) for tag in tags if (place := self._held.find(tag)) >= 0), default=None)
        return found or (len(self._held) - max(beginning_of(tag, self._held) for tag in tags), None)

    def _told(self) -> list[OutputPiece]:
        """What is to go out now, as few pieces as possible."""
        pieces = list[OutputPiece]()
        for piece in self._pieces:
            match pieces[-1:], piece:
                case [str() as before], str():
                    pieces[-1] = before + piece
                case [Thought(before)], Thought(text):
                    pieces[-1] = Thought(before + text)
                case [CallArguments(index, before)], CallArguments(_, arguments) if piece.index == index:
                    pieces[-1] = CallArguments(index, before + arguments)
                case _:
                    pieces.append(piece)
        self._pieces = []
        return pieces


class ObjectEnd:
    """Finds where a JSON object ends that begins with a brace."""

    def __init__(self) -> None:
        self.has_ended = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def read(self, text: str) -> int:
        """How many of these characters, which follow the ones before, are of the object."""
        for place, letter in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif letter == "\\":
                    self._escaped = True
                elif letter == '"':
                    self._in_string = False
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if not self._depth:
                    self.has_ended = True
                    return place + 1
        return len(text)
