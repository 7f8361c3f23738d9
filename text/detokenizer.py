"""Token ids to text, one token at a time: the pieces add up to decoding all of them at once. Pure.

`tokenizers.decoders.DecodeStream` does nearly this, but gives a character of byte-fallback tokens out before the run of
bytes has ended. The decoder judges a run as a whole: if a later byte makes it invalid, DecodeStream raises "Invalid
prefix", and text that it has returned cannot be taken back. Here a run of byte tokens waits for its end.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
_MOST_WITHHELD = 64
"""Tokens whose text is withheld: a character has four bytes at most, so that so many are no beginning of one."""
_SETTLED_BY = 8
"""Tokens, and so bytes, behind a place that no character can lie across any more."""


def special_token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """By text."""
    added = tokenizer.get_added_tokens_decoder()
    return {token.content: token_id for token_id, token in added.items() if token.special}


def silent_token_ids(tokenizer: Tokenizer, skip_special_tokens: bool = True) -> frozenset[int]:
    """Tokens that do not end a run of bytes: byte-fallback tokens, and special ones where they are left out."""
    spelled = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    silent = frozenset(token_id for token_id in spelled if token_id is not None)
    return silent.union(special_token_ids(tokenizer).values()) if skip_special_tokens else silent


class Detokenizer:
    """The text of one choice.

    Only a window is decoded again: from the last place but one at which text came out (a decoder may treat the very
    first token differently, so a window must not begin with the new one) to the newest token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        silent: frozenset[int],
        skip_special_tokens: bool = True,
        left_out: frozenset[int] = frozenset(),
    ) -> None:
        """`silent` is `silent_token_ids(tokenizer, skip_special_tokens)`, made once per tokenizer.

        `left_out`: tokens that have no text, where not all special ones are skipped.
        """
        self._tokenizer = tokenizer
        self._silent = silent
        self._skip_special_tokens = skip_special_tokens
        self._left_out = left_out
        self._window: list[int] = []
        self._said_tokens = 0  # tokens of the window whose text came out
        self._said = ""  # their text, as decoded within the window

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; empty while a character or a run of bytes is incomplete."""
        if token_id in self._left_out:
            return ""
        self._window.append(token_id)
        text = "" if token_id in self._silent else self._say(self._window)
        if not text and len(self._window) - self._said_tokens > _MOST_WITHHELD and token_id not in self._silent:
            return self._settle()
        return text

    def push_all(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these; over time the same as of `push` one by one."""
        if len(token_ids) > 1 and self._silent.isdisjoint(token_ids) and self._left_out.isdisjoint(token_ids):
            text = self._say([*self._window, *token_ids])
            if text:
                return text
        return "".join(map(self.push, token_ids))

    def finish(self) -> str:
        """The text that was withheld; incomplete characters become U+FFFD, as when decoding everything at once."""
        text = self._decode(self._window)
        return text[len(self._said) :]

    def _settle(self) -> str:
        """The text of bytes that are no characters, up to a place where the window may be cut: decoding all of it with
        each token would take quadratic time.
        """
        whole = self._decode(self._window)
        for place in range(len(self._window) - _SETTLED_BY, len(self._window) - 2 * _SETTLED_BY, -1):
            text = self._decode(self._window[:place])
            if len(text) > len(self._said) and text + self._decode(self._window[place:]) == whole:
                new = text[len(self._said) :]
                self._window, self._said_tokens, self._said = self._window[place:], 0, ""
                return new
        return ""

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _say(self, window: list[int]) -> str:
        """A window's text beyond what was returned, if it ends with a whole character: then it is the window."""
        text = self._decode(window)
        if len(text) <= len(self._said) or text.endswith(_REPLACEMENT):
            return ""
        new = text[len(self._said) :]
        self._window = window[self._said_tokens :]
        self._said_tokens = len(self._window)
        self._said = self._decode(self._window)
        return new
