"""Base of all formats' readers: text, white space around calls, and text that looks like a call. Pure.

Output depends only on the text, not on how the text was cut into tokens: while a text has two interpretations, the
reader waits for more. A call is sent once its name and the beginning of its arguments are known. Anything that is not a
call is text. If a call turns out to be invalid after its arguments were sent, the text begins after these arguments.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence

from baton.text.output.pieces import CallArguments, CallStart, OutputPiece, Schemas, Thought, beginning_of, new_id
from baton.text.output.tool_calls import CallObject, NotACall

SPACE = " \t\r\n"
NAME = re.compile(r"[A-Za-z0-9_.\-]+")
"""Name of a function."""


class FormatReader(ABC):
    """State machine over an answer. A state is a method that consumes text of `_held`, and returns False to wait."""

    def __init__(self, schemas: Schemas, new_call_id: Callable[[], str] = new_id) -> None:
        self.calls = 0
        self._schemas = schemas
        self._new_call_id = new_call_id
        self._held = ""  # text not parsed yet
        self._raw = ""  # parsed text of a call that was not sent yet
        self._space = ""  # white space after text, dropped if a call follows
        self._behind_call = False  # whether the last piece was a call, after which white space is dropped
        self._pieces: list[OutputPiece] = []
        self._state: Callable[[], bool] = self._text
        self._object = ObjectEnd()

    @property
    def thinks(self) -> bool | None:
        """Return whether the next text is reasoning; None for a format without reasoning."""
        return None

    def push(self, text: str) -> list[OutputPiece]:
        self._held += text
        while self._held and self._state():
            pass
        return self._told()

    def finish(self) -> list[OutputPiece]:
        """Return the withheld pieces at the end of the answer."""
        self._end()
        rest, self._raw, self._held = self._raw + self._held, "", ""
        self._say(rest)
        if self._space and not self.calls:
            self._pieces.append(self._space)
        return self._told()

    @abstractmethod
    def _text(self) -> bool:
        """Parse text outside of calls. This is the first state, and the state between calls."""

    def _end(self) -> None:  # noqa: B027, most have nothing to settle
        """Settle the state at the end of the answer. What remains in `_raw` and `_held` is text."""

    # Methods that send pieces

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

    def _pass_call(self, call: CallObject, names: Container[str] | None = None) -> None:
        """Send the received part of a call in JSON. `names`: known functions; None for any.

        Raises: NotACall, also for an unknown function.
        """
        place = 0
        for place, letter in enumerate(self._held):  # noqa: B007, of the last
            was_named = call.name is not None
            call.push(letter)
            if not was_named and call.name is not None:
                if names is not None and call.name not in names:
                    raise NotACall
                self._begin(call.name)
            if call.closed:
                break
        self._take(place if call.failed else place + 1)
        if call.name is not None:
            self._raw = ""
            self._argue(call.take())

    def _argue(self, arguments: str) -> None:
        if arguments:
            self._pieces.append(CallArguments(self.calls - 1, arguments))

    def _no_call(self, tag: str) -> bool:
        """Treat `tag` as text and parse what followed it again."""
        self._held = self._raw[len(tag) :] + self._held
        self._raw, self._state = "", self._text
        self._say(tag)
        return True

    def _give_up(self, tag: str) -> bool:
        """Treat an invalid call as text: the complete call if it was not sent, else what follows the sent arguments.

        `tag`: tag with which the call began.
        """
        if self._raw.startswith(tag):
            return self._no_call(tag)
        self._held, self._raw, self._state = self._raw + self._held, "", self._text
        return True

    def _begin_object(self, name: str, tag: str) -> bool | None:
        """Send the start of a call whose arguments follow as a JSON object.

        Return whether the start was sent: False if the next text is not an object, None while this is unknown.
        """
        if not self._skip_space():
            return None
        if not self._held.startswith("{"):
            self._no_call(tag)
            return False
        self._begin(name)
        self._object = ObjectEnd()
        return True

    def _pass_object(self, *ends: str) -> bool:
        """Send received arguments; return whether they have ended: complete object, or a tag of `ends` found."""
        place, tag = self._find(ends)
        passed = self._object.read(self._held[:place])
        self._argue(self._held[:passed])
        self._held = self._held[passed:]
        return self._object.has_ended or tag is not None

    # Methods that consume text

    def _comes(self, tag: str) -> bool | None:
        """Return whether the next text is `tag`; None while too little text has arrived to decide."""
        if self._held.startswith(tag):
            return True
        return None if tag.startswith(self._held) else False

    def _take(self, characters: int) -> str:
        """Move `characters` characters of a call from `_held` to `_raw`, and return them."""
        taken, self._held = self._held[:characters], self._held[characters:]
        self._raw += taken
        return taken

    def _drop(self, tag: str) -> None:
        """Skip `tag`, and drop the call's text in `_raw`."""
        self._held, self._raw = self._held[len(tag) :], ""

    def _skip_space(self) -> bool:
        """Skip white space; return whether anything follows."""
        self._take(len(self._held) - len(self._held.lstrip(SPACE)))
        return bool(self._held)

    def _say_until(self, tags: Sequence[str]) -> str | None:
        """Send text up to the first tag. Move the tag to `_raw` and return it; None if there is no tag yet."""
        place, tag = self._find(tags)
        self._say(self._held[:place])
        self._held = self._held[place:]
        return self._take(len(tag)) if tag is not None else None

    def _find(self, tags: Sequence[str]) -> tuple[int, str | None]:
        """Return position and text of the first tag. If none: the first position where a tag may begin, and None."""
        found = min(((place, tag) for tag in tags if (place := self._held.find(tag)) >= 0), default=None)
        return found or (len(self._held) - max(beginning_of(tag, self._held) for tag in tags), None)

    def _told(self) -> list[OutputPiece]:
        """Return the pieces that may be sent now, merged into as few as possible."""
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
    """Search for the end of a JSON object that begins with a brace."""

    def __init__(self) -> None:
        self.has_ended = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def read(self, text: str) -> int:
        """Return how many of the next characters belong to the object."""
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
