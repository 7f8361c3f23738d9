"""Token ids to text as an offline answer grows."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from baton.generation.detokenizer import Detokenizer, silent_token_ids


class TextDecoder:
    """A tokenizer's way back to text, shared by all answers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._silent = {skip: silent_token_ids(tokenizer, skip) for skip in (False, True)}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def growing(self, skip_special_tokens: bool) -> "GrowingText":
        silent = self._silent[skip_special_tokens]
        return GrowingText(Detokenizer(self._tokenizer, silent, skip_special_tokens))


class GrowingText:
    """The text of one answer: as pushed so far, `text` never changes but at its end."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self.text = ""

    def push(self, token_id: int) -> None:
        """Adds the text that became certain; none while a character or a run of bytes is incomplete."""
        self.text += self._detokenizer.push(token_id)

    def finish(self) -> None:
        """Adds the text that was withheld."""
        self.text += self._detokenizer.finish()
