"""Conversion of callers' prompts to token ids, and of token ids to text."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, cast

from tokenizers import Tokenizer

from baton.engine.config.model_config import ModelError
from baton.text.detokenizer import Detokenizer, decode, silent_token_ids
from baton.text.host.files import reads
from baton.text.pooling import second_text
from baton.text.sampling import FieldRefused, long_prompt_fault, most_prompt_tokens
from baton.text.tokenizer.checkpoint_tokenizer import DEFAULT, WITH_TOOLS, CheckpointTokenizer, read_tokenizer


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

    def __init__(self, tokenizer: Tokenizer, cleans_spaces: bool = False) -> None:
        self._tokenizer = tokenizer
        self._cleans_spaces = cleans_spaces
        self._silent = {skip: silent_token_ids(tokenizer, skip) for skip in (False, True)}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return decode(self._tokenizer, token_ids, skip_special_tokens, self._cleans_spaces)

    def detokenizer(self, skip_special_tokens: bool) -> Detokenizer:
        silent = self._silent[skip_special_tokens]
        return Detokenizer(self._tokenizer, silent, skip_special_tokens, cleans_spaces=self._cleans_spaces)


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """Source text of a chat template; reasoning parsers search it for the markers of reasoning."""

    source: str
    tool_format: str = ""


ENDING_TOKENS = 64


class PromptEncoder:
    """Tokenizer and chat template of a model."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Read the tokenizer in `folder`. Raises: ModelError."""
        self.folder = folder
        self._source = _read_source(folder)
        self._tokenizer = self._source.tokenizer()
        self.decoder = TextDecoder(self._tokenizer, self._source.cleans_spaces)
        self.end_token_ids = self._source.end_token_ids
        self._vocab_size = vocab_size
        sources = [source for name in (DEFAULT, WITH_TOOLS) if (source := self._source.templates.get(name))]
        self.template = TemplateSource("\n".join(sources)) if sources else None

    def read(self, prompts: Sequence[PromptType]) -> list[Prompt]:
        """Convert prompts: encode texts in one batch, with special tokens; check token ids. Raises: ValueError."""
        texts = [text_of(prompt) for prompt in prompts]
        encoded = iter(self._encode_all([text for text in texts if text is not None], add_special_tokens=True))
        return [
            Prompt(text, tuple(next(encoded))) if text is not None else Prompt(None, self._checked(prompt))
            for prompt, text in zip(prompts, texts, strict=True)
        ]

    def read_cut(self, prompts: Sequence[PromptType]) -> list[Prompt]:
        """Convert prompts to embed, as `read` does, but cut texts as sentence-transformers does. Raises: ValueError."""
        if self._source.max_text_tokens is None:
            return self.read(prompts)
        return [
            Prompt(None, self._checked(prompt))
            if (text := text_of(prompt)) is None
            else Prompt(text, self._source.cut(self._tokenizer, text))
            for prompt in prompts
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
        from transformers.utils.chat_template_utils import render_jinja_template  # slow to import

        if not messages:
            raise ValueError("messages: must not be empty")
        given = [{name: value for name, value in message.items() if value is not None} for message in messages]
        listed: list[Any] | None = None if tools is None else list(tools)
        (rendered,), _ = cast(
            "tuple[list[str], object]",
            render_jinja_template(
                conversations=[given],
                tools=listed,
                chat_template=self._chat_template(tools is not None),
                add_generation_prompt=add_generation_prompt,
                **{**self._source.special_tokens, **(options or {})},
            ),
        )
        return Prompt(rendered, tuple(self.encode(rendered)))

    def _chat_template(self, has_tools: bool) -> str:
        """Return the chat template that transformers takes. Raises: ValueError if the model has none."""
        named = self._source.templates
        name = WITH_TOOLS if has_tools and WITH_TOOLS in named else DEFAULT
        if name not in named:
            known = ", ".join(sorted(named)) or "none"
            raise ValueError(f"messages: the model has no chat template named {name}; it has {known}")
        return named[name]

    def ending(self, prompt: Prompt) -> str:
        """Return the text of a prompt's last ENDING_TOKENS tokens."""
        return self.decoder.decode(prompt.token_ids[-ENDING_TOKENS:], False)

    def read_pair(self, query: PromptType, document: PromptType, as_pair: bool = False) -> Prompt:
        """Encode a reranker's two texts: as a tokenizer's pair, or by the chat template as roles query and document.

        Raises: ValueError.
        """
        one, other = text_of(query), text_of(document)
        if one is None or other is None:
            raise ValueError("a reranker needs two texts, not token ids")
        if as_pair:
            encoded = self._source.pair(self._tokenizer, one, other)
            return Prompt(None, tuple(encoded.ids), second_text(encoded.type_ids))
        messages = [{"role": role, "content": text} for role, text in zip(PAIR, (one, other), strict=True)]
        return self.read_chat(messages, True)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        return self._encode_all([text], add_special_tokens=False)[0]

    def _encode_all(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        ids = [each.ids for each in encoded]
        if self._tokenizer.get_vocab_size() > self._vocab_size:
            self._check(chain.from_iterable(ids))
        return ids

    def _checked(self, prompt: PromptType) -> tuple[int, ...]:
        token_ids = prompt["prompt_token_ids"] if isinstance(prompt, Mapping) else prompt  # type: ignore[typeddict-item]
        self._check(token_ids)
        return tuple(cast("Sequence[int]", token_ids))

    def _check(self, token_ids: Iterable[object]) -> None:
        """Check that the model has these tokens. Raises: ValueError."""
        for token_id in token_ids:
            if not isinstance(token_id, int) or not 0 <= token_id < self._vocab_size:
                raise ValueError(f"prompt_token_ids: {token_id!r} is not a token id below {self._vocab_size}")


@reads(ModelError)
def _read_source(folder: Path) -> CheckpointTokenizer:
    return read_tokenizer(folder)


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
