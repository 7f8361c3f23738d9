"""The bytes that each token stands for, exactly: also of tokens that are a part of a character. Pure.

Decoding a token by itself does not show them: half a character becomes U+FFFD, and many decoders drop a leading space.
"""

import json
import re
from collections.abc import Mapping

from tokenizers import Tokenizer

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "▁"


class TokenBytes:
    """Remembers its results: at most one entry per token of the vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        # The state of the decoder alone: `Tokenizer.to_str()` would spell the whole vocabulary.
        decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
        self._letters = _byte_letters() if _mentions(decoder, "ByteLevel") else None
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """Empty for an id that the tokenizer does not have: vocabularies of logits are padded."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._spell(token_id)
        return found

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._letters is not None:
            letters = self._letters
            return b"".join(bytes((letters[letter],)) if letter in letters else letter.encode() for letter in token)
        match = _BYTE_FALLBACK.fullmatch(token)
        return bytes((int(match[1], 16),)) if match else token.replace(_SPACE, " ").encode()


def _mentions(decoder: object, kind: str) -> bool:
    """Whether a decoder is of a kind, or has one of it among its steps."""
    if isinstance(decoder, Mapping):
        return decoder.get("type") == kind or any(_mentions(step, kind) for step in decoder.get("decoders", ()))
    return False


def _byte_letters() -> dict[str, int]:
    """The printable character that byte-level vocabularies write for each byte, as in GPT-2's `bytes_to_unicode`."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}
