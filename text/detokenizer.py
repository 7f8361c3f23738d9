"""Conversion of token ids to text, token by token: the pieces add up to decoding all tokens together. Pure.

`tokenizers.decoders.DecodeStream` is similar, but emits a character of byte-fallback tokens before the sequence of
such tokens ends. The decoder checks the complete sequence: if a later byte makes it invalid, DecodeStream raises
"Invalid prefix", and its output cannot be withdrawn. Here, byte tokens wait for the end of their sequence.
"""

import re
from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

_REPLACEMENT = "\ufffd"
_MOST_WITHHELD = 64
"""Maximum number of tokens whose text is withheld: more are certainly not one character of at most four bytes."""
_SETTLED_BY = 8
"""Minimum number of tokens after a cut of the window, more than the at most four tokens of a divided character."""


def special_token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    added = tokenizer.get_added_tokens_decoder()
    return {token.content: token_id for token_id, token in added.items() if token.special}


def silent_token_ids(tokenizer: Tokenizer, skip_special_tokens: bool = True) -> frozenset[int]:
    """Return the tokens that do not end a sequence of byte tokens: all byte tokens, and skipped special tokens."""
    spelled = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    silent = frozenset(token_id for token_id in spelled if token_id is not None)
    return silent.union(special_token_ids(tokenizer).values()) if skip_special_tokens else silent


def joins_bytes(tokenizer: Tokenizer) -> bool:
    """Return whether the decoder only joins the bytes of tokens, so that a complete text depends on no other token."""
    return isinstance(tokenizer.decoder, ByteLevel)


_CLEANED = (
    *((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'")),
    *((" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")),
)
"""Replacements of transformers' `clean_up_tokenization`, in its order."""
_CUT = re.compile(r"(?<=[^ 'n])(?= )")
"""Positions at which a text can be cut such that both parts, cleaned, add up to the cleaned text."""


def clean_spaces(text: str) -> str:
    """Remove spaces before punctuation and contractions, as transformers does for some tokenizers."""
    for found, replacement in _CLEANED:
        text = text.replace(found, replacement)
    return text


def decode(tokenizer: Tokenizer, token_ids: Sequence[int], skip_special_tokens: bool, cleans_spaces: bool) -> str:
    """Return the text of all tokens together."""
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
    return clean_spaces(text) if cleans_spaces else text


class Detokenizer:
    """Text of one choice, decoded as its tokens arrive.

    For each new token, only a window is decoded: the tokens whose text was returned last, and all later tokens. A
    decoder may treat the first token of its input differently, so the window must not begin with the new token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        silent: frozenset[int],
        skip_special_tokens: bool = True,
        left_out: frozenset[int] = frozenset(),
        cleans_spaces: bool = False,
        alone: dict[int, str] | None = None,
        joins: bool = False,
    ) -> None:
        """Start an empty text.

        `silent`: result of silent_token_ids(tokenizer, skip_special_tokens), computed once per tokenizer. `left_out`:
        tokens that get no text although not all special tokens are skipped. `cleans_spaces`: see clean_spaces.
        `alone`: texts of single tokens that were decoded before, for detokenizers with the same tokenizer and
        `skip_special_tokens`. `joins`: result of joins_bytes(tokenizer).
        """
        self._tokenizer = tokenizer
        self._silent = silent
        self._skip_special_tokens = skip_special_tokens
        self._left_out = left_out
        self._alone = {} if alone is None else alone
        self._joins = joins and not left_out
        self._window: list[int] = []
        self._said_tokens = 0  # number of tokens of the window whose text was returned
        self._said = ""  # text of those tokens, decoded within the window
        self._cleans_spaces = cleans_spaces
        self._uncleaned = ""  # text that cannot be cleaned before more text is known

    def push(self, token_id: int) -> str:
        """Return the text completed by this token; empty while a character or sequence of bytes is incomplete."""
        return self._cleaned(self._push(token_id))

    def _push(self, token_id: int) -> str:
        if token_id in self._left_out:
            return ""
        self._window.append(token_id)
        text = "" if token_id in self._silent else self._say(self._window)
        if not text and len(self._window) - self._said_tokens > _MOST_WITHHELD and token_id not in self._silent:
            return self._settle()
        return text

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Return the text completed by these tokens. The total text equals that of one `push` per token."""
        if self._joins and token_ids and self._said_tokens == len(self._window):  # usual case: no text is withheld
            texts = list(map(self._text_alone, token_ids))
            text = "".join(texts)
            if _REPLACEMENT not in text:
                self._window, self._said_tokens, self._said = [token_ids[-1]], 1, texts[-1]
                return self._cleaned(text)
        if len(token_ids) > 1 and self._silent.isdisjoint(token_ids) and self._left_out.isdisjoint(token_ids):
            text = self._say([*self._window, *token_ids])
            if text:
                return self._cleaned(text)
        return "".join(map(self.push, token_ids))

    def finish(self) -> str:
        """Return the withheld text. Incomplete characters become U+FFFD, as when decoding all tokens together."""
        text = self._decode(self._window)
        return self._cleaned(text[len(self._said) :], ends=True)

    def _cleaned(self, text: str, ends: bool = False) -> str:
        """Return the text, or what is cleaned of it and of withheld text. `ends`: no text follows."""
        if not self._cleans_spaces:
            return text
        text = self._uncleaned + text
        cut = len(text) if ends else max((cut.start() for cut in _CUT.finditer(text)), default=0)
        self._uncleaned = text[cut:]
        return clean_spaces(text[:cut])

    def _settle(self) -> str:
        """Return the text of withheld bytes that form no characters, up to a position at which the window can be cut.

        Cutting keeps the window short. Otherwise each token would decode a longer window, in quadratic time altogether.
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
        """Return the new text of a window and move the window on; do nothing while the last character is incomplete."""
        text = self._decode(window)
        if len(text) <= len(self._said) or text.endswith(_REPLACEMENT):
            return ""
        new = text[len(self._said) :]
        self._window = window[self._said_tokens :]
        self._said_tokens = len(self._window)
        is_one = len(self._window) == 1
        self._said = self._text_alone(self._window[0]) if is_one else self._decode(self._window)
        return new

    def _text_alone(self, token_id: int) -> str:
        """Return the text of a token without its neighbours."""
        text = self._alone.get(token_id)
        if text is None:
            text = self._alone[token_id] = self._decode([token_id])
        return text
