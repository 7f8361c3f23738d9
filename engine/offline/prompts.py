"""Conversion of callers' prompts to token ids, and of token ids to text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, cast

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from baton.engine.config.model_config import ModelError
from baton.text.detokenizer import Detokenizer, silent_token_ids
from baton.text.host.files import reads
from baton.text.pooling import second_text
from baton.text.sampling import FieldRefused, long_prompt_fault, most_prompt_tokens


class TokensPrompt(TypedDict):
    """Prompt of token ids, as in vLLM."""

    prompt_token_ids: list[int]


class TextPrompt(TypedDict):
    """Prompt of text, as in vLLM."""

    prompt: str


PAIR = ("query", "document")
PromptType: TypeAlias = str | Sequence[int] | TokensPrompt | TextPrompt
Message: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str | None  # None if the prompt was given as token ids
    token_ids: tuple[int, ...]
    second_from: int | None = None  # index of the second text's first token, as in Pooling


class TextDecoder:
    """Conversion of token ids to text, shared by all answers of an engine."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._silent = {skip: silent_token_ids(tokenizer, skip) for skip in (False, True)}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def detokenizer(self, skip_special_tokens: bool) -> Detokenizer:
        return Detokenizer(self._tokenizer, self._silent[skip_special_tokens], skip_special_tokens)


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """Source text of a chat template; reasoning parsers search it for the markers of reasoning."""

    source: str
    tool_format: str = ""


ENDING_TOKENS = 64


class PromptEncoder:
    """Tokenizer and chat template of a model."""

    def __init__(self, folder: str, vocab_size: int) -> None:
        self.tokenizer: Any = _read_tokenizer(Path(folder))
        self.decoder = TextDecoder(self.tokenizer.backend_tokenizer)
        self._vocab_size = vocab_size
        source = getattr(self.tokenizer, "chat_template", None)
        self.template = TemplateSource(source) if isinstance(source, str) else None

    def read(self, prompts: Sequence[PromptType]) -> list[Prompt]:
        """Convert prompts: encode texts in one batch, with special tokens; check token ids. Raises: ValueError."""
        texts = [text_of(prompt) for prompt in prompts]
        encoded = iter(self._encode_all([text for text in texts if text is not None], add_special_tokens=True))
        return [
            Prompt(text, tuple(next(encoded))) if text is not None else Prompt(None, self._checked(prompt))
            for prompt, text in zip(prompts, texts, strict=True)
        ]

    def read_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Format one conversation with the model's chat template, which adds special tokens; then encode the text.

        `options`: variables of the template. Raises: ValueError.
        """
        text = self.tokenizer.apply_chat_template(
            list(messages),
            tools=None if tools is None else list(tools),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **(options or {}),
        )
        return Prompt(text, tuple(self.encode(text)))

    def ending(self, prompt: Prompt) -> str:
        """Return the text of a prompt's last ENDING_TOKENS tokens."""
        return self.decoder.decode(prompt.token_ids[-ENDING_TOKENS:], False)

    def read_pair(self, query: PromptType, document: PromptType, as_pair: bool = False) -> Prompt:
        """Encode a reranker's two texts: as a tokenizer's pair, or by the chat template as roles query and document.

        Raises: ValueError.
        """
        texts = (text_of(query), text_of(document))
        if None in texts:
            raise ValueError("a reranker needs two texts, not token ids")
        if as_pair:
            encoded = self.tokenizer(*texts)
            return Prompt(None, tuple(encoded["input_ids"]), second_text(encoded.encodings[0].type_ids))
        return self.read_chat([{"role": role, "content": text} for role, text in zip(PAIR, texts, strict=True)], True)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        return self._encode_all([text], add_special_tokens=False)[0]

    def _encode_all(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        if not texts:
            return []
        encoded = self.tokenizer(texts, add_special_tokens=add_special_tokens)
        return cast("list[list[int]]", encoded["input_ids"])

    def _checked(self, prompt: PromptType) -> tuple[int, ...]:
        token_ids = prompt["prompt_token_ids"] if isinstance(prompt, Mapping) else prompt  # type: ignore[typeddict-item]
        for token_id in token_ids:
            if not isinstance(token_id, int) or not 0 <= token_id < self._vocab_size:
                raise ValueError(f"prompt_token_ids: {token_id!r} is not a token id below {self._vocab_size}")
        return tuple(cast("Sequence[int]", token_ids))


@reads(ModelError)
def _read_tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(folder))


def check_prompt_tokens(tokens: int, max_model_len: int, pooled: bool = False) -> None:
    """Check the number of a prompt's tokens. Raises: FieldRefused."""
    if tokens == 0:
        raise FieldRefused("prompt", "is empty")
    if tokens > most_prompt_tokens(max_model_len, pooled):
        raise FieldRefused("prompt", long_prompt_fault(tokens, max_model_len, pooled))


def text_of(prompt: PromptType) -> str | None:
    """Return a prompt's text, or None for token ids. Raises: ValueError for a mapping without text or token ids."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" in prompt:
            return None
        if isinstance(prompt.get("prompt"), str):
            return prompt["prompt"]
        raise ValueError("a prompt mapping needs prompt (text) or prompt_token_ids")
    return None


def as_list(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """Return one prompt or several as a list. A list that begins with a number is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [cast("PromptType", prompts)]
    if prompts and isinstance(prompts[0], int):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[PromptType]", prompts))
