"""Token ids to text, one token at a time, and where a stop string ends it. The window is router/detokenizer.py's."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

Decode = Callable[[list[int]], str]
_REPLACEMENT = "\ufffd"


class Stop(NamedTuple):
    begin: int  # in the text
    text: str


class TextDecoder:
    """A tokenizer's way back to text, shared by all answers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        spelled = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self._bytes = frozenset(token_id for token_id in spelled if token_id is not None)
        added = tokenizer.get_added_tokens_decoder().items()
        self._special = frozenset(token_id for token_id, token in added if token.special)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def silent(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether a token does not end a run of bytes: part of a character, or left out."""
        return token_id in self._bytes or (skip_special_tokens and token_id in self._special)


class GrowingText:
    """The text of one answer: as pushed so far, `text` never changes but at its end."""

    def __init__(self, decoder: TextDecoder, skip_special_tokens: bool) -> None:
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._said_tokens = 0  # tokens of the window whose text is in `text`
        self._said = ""  # their text, as decoded within the window
        self.text = ""

    def push(self, token_id: int) -> None:
        """Adds the text that became certain; none while a character or a run of bytes is incomplete."""
        self._window.append(token_id)
        if self._decoder.silent(token_id, self._skip):
            return
        decoded = self._decode()
        if len(decoded) <= len(self._said) or decoded.endswith(_REPLACEMENT):
            return
        self.text += decoded[len(self._said) :]
        # A decoder may treat the very first token differently: the next window begins with one that is out already.
        self._window = self._window[self._said_tokens :]
        self._said_tokens = len(self._window)
        self._said = self._decode()

    def finish(self) -> None:
        """Adds the text that was withheld; incomplete characters become U+FFFD, as when decoding everything at once."""
        self.text += self._decode()[len(self._said) :]
        self._window.clear()
        self._said = ""

    def _decode(self) -> str:
        return self._decoder.decode(self._window, self._skip)


def find_stop(text: str, known: int, stops: Sequence[str]) -> Stop | None:
    """The stop string complete first in `text`, of several the longest. None ends in the first `known` characters."""
    found = (Stop(begin, stop) for stop in stops if (begin := text.find(stop, max(0, known - len(stop) + 1))) >= 0)
    return min(found, key=lambda stop: (stop.begin + len(stop.text), stop.begin), default=None)
