"""Stop strings: which tokens may go out now, which are held back, and where the answer ends. Pure.

Tokens and their text are held together. A token belongs to the answer when its text begins before the stop does;
a token whose text is not known yet (part of a character, or a special token) begins where the known text ends.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class PassedTokens(NamedTuple):
    """Tokens that may go out, with the text that may go out with them."""

    token_ids: tuple[int, ...]
    text: str


class _Held(NamedTuple):
    token_id: int
    begin: int  # where its text begins, in characters from the start of the answer


class Stop(NamedTuple):
    begin: int  # in the text
    text: str


def find_stop(text: str, known: int, stops: Sequence[str]) -> Stop | None:
    """The stop string complete first in `text`, of several the longest. None ends in the first `known` characters."""
    found = (Stop(begin, stop) for stop in stops if (begin := text.find(stop, max(0, known - len(stop) + 1))) >= 0)
    return min(found, key=lambda stop: (stop.begin + len(stop.text), stop.begin), default=None)


class StopFilter:
    """Passes one choice's tokens through until the first stop string.

    The first is the one that is complete first; of several complete at the same character, the longest. So the result
    does not depend on how the text was cut into pieces. The first `min_tokens` tokens, with the text that became known
    with them, are never part of a stop.
    """

    def __init__(self, stops: tuple[str, ...], min_tokens: int = 0) -> None:
        self._stops = stops
        self._exempt_tokens = min_tokens
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held: deque[_Held] = deque()
        self._text = ""  # known, not gone out
        self._gone = 0  # characters that went out
        self.matched: str | None = None

    @property
    def passes_all(self) -> bool:
        """There is nothing to stop at: tokens and text may go out as they come, without a push."""
        return not self._stops

    def push(self, token_id: int, text: str) -> PassedTokens:
        """Takes the next token and the text that became known with it; returns the piece that may go out.

        After a match nothing more goes out, and further tokens are dropped.
        """
        if self.matched is not None:
            return PassedTokens((), "")
        if not self._stops:
            return PassedTokens((token_id,), text)
        if self._exempt_tokens > 0:
            self._exempt_tokens -= 1
            self._gone += len(text)
            return PassedTokens((token_id,), text)
        self._held.append(_Held(token_id, self._gone + len(self._text)))
        return self._take(text)

    def finish(self, tail: str) -> PassedTokens:
        """The sequence has ended; `tail` is text that was still withheld. Returns all that is left of the answer."""
        if self.matched is not None:
            return PassedTokens((), "")
        if not self._stops:
            return PassedTokens((), tail)
        piece = self._take(tail)
        if self.matched is not None:
            return piece
        rest = self._release(len(self._text), everything=True)
        return PassedTokens(piece.token_ids + rest.token_ids, piece.text + rest.text)

    def _take(self, text: str) -> PassedTokens:
        self._text += text
        match = find_stop(self._text, 0, self._stops)
        if match is None:
            return self._release(len(self._text) - self._possible_beginning(), everything=False)
        self.matched = match.text
        piece = self._release(match.begin, everything=False)
        self._held.clear()
        self._text = ""
        return piece

    def _release(self, characters: int, everything: bool) -> PassedTokens:
        """Lets the first `characters` of the held text go, and the tokens that begin before their end."""
        boundary = self._gone + characters
        token_ids: list[int] = []
        while self._held and (everything or self._held[0].begin < boundary):
            token_ids.append(self._held.popleft().token_id)
        text, self._text = self._text[:characters], self._text[characters:]
        self._gone = boundary
        return PassedTokens(tuple(token_ids), text)

    def _possible_beginning(self) -> int:
        """Length of the longest end of the held text that a stop string may begin with."""
        for length in range(min(self._longest - 1, len(self._text)), 0, -1):
            end = self._text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
