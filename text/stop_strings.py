"""Stop strings: which tokens may be sent, which tokens are withheld, and where the answer ends. Pure.

Tokens and their text are withheld together. A token belongs to the answer if its text begins before the stop string. A
token without text yet (part of a character, or a special token) begins at the end of the known text.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class PassedTokens(NamedTuple):
    """Tokens that may be sent now, with their text."""

    token_ids: tuple[int, ...]
    text: str


class _Held(NamedTuple):
    token_id: int
    begin: int  # start of the token's text, in characters from the start of the answer


class Stop(NamedTuple):
    begin: int  # index in the text at which the stop string begins
    text: str


def find_stop(text: str, stops: Sequence[str]) -> Stop | None:
    """Return the stop string that ends first in `text`. If several end at the same position, return the longest."""
    found = (Stop(begin, stop) for stop in stops if (begin := text.find(stop)) >= 0)
    return min(found, key=lambda stop: (stop.begin + len(stop.text), stop.begin), default=None)


class StopFilter:
    """Filter that passes one choice's tokens until the first stop string.

    The stop string that ends first counts, so the result does not depend on how the text was cut into tokens. The first
    `min_tokens` tokens and their text are never part of a stop string.
    """

    def __init__(self, stops: tuple[str, ...], min_tokens: int = 0) -> None:
        self._stops = stops
        self._exempt_tokens = min_tokens
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held: deque[_Held] = deque()
        self._text = ""  # withheld text
        self._gone = 0  # number of characters passed so far
        self.matched: str | None = None
        self.passes_all = not stops
        """Whether there are no stop strings. If so, callers need not call `push`."""

    def push(self, token_id: int, text: str) -> PassedTokens:
        """Add the next token and the text completed by it; return what may be sent.

        After a match nothing is sent, and further tokens are dropped.
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
        """Add the last text and return the rest of the answer."""
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
        match = find_stop(self._text, self._stops)
        if match is None:
            return self._release(len(self._text) - self._possible_beginning(), everything=False)
        self.matched = match.text
        piece = self._release(match.begin, everything=False)
        self._held.clear()
        self._text = ""
        return piece

    def _release(self, characters: int, everything: bool) -> PassedTokens:
        """Pass the first `characters` characters of the withheld text, and the tokens that begin within them."""
        boundary = self._gone + characters
        token_ids: list[int] = []
        while self._held and (everything or self._held[0].begin < boundary):
            token_ids.append(self._held.popleft().token_id)
        text, self._text = self._text[:characters], self._text[characters:]
        self._gone = boundary
        return PassedTokens(tuple(token_ids), text)

    def _possible_beginning(self) -> int:
        """Return the length of the longest suffix of the withheld text that may be the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(self._text)), 0, -1):
            end = self._text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
