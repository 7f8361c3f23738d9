"""Tokens and their log-probabilities as OpenAI writes them. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from baton.router.types.events import TokenLogprob
from baton.router.types.response import PromptPart

_LEAST = -9999.0
"""In place of minus infinity, which JSON does not have."""


class Spelling(Protocol):
    """The bytes of each token."""

    def __getitem__(self, token_id: int, /) -> bytes: ...


class TokenTexts:
    """Texts of tokens by themselves; those of a part of a character are written `bytes:\\xe2\\x82`."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling

    def text(self, token_id: int) -> str:
        spelled = self._spelling[token_id]
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def chat(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """`logprobs` of a chat choice; one entry per token."""
        content = [
            {
                **self._entry(token_id, scored.logprob),
                "top_logprobs": [self._entry(each.token_id, each.logprob) for each in scored.top],
            }
            for token_id, scored in zip(token_ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def completion(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], offset: int
    ) -> dict[str, Any]:
        """`logprobs` of a completion choice. `offset`: characters of text before the first of these tokens.

        None is the first token of a prompt, for which there is nothing that it could follow.
        """
        tokens = [self.text(token_id) for token_id in token_ids]
        offsets = []
        for text in tokens:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [None if scored is None else _finite(scored.logprob) for scored in logprobs],
            "top_logprobs": [
                None if scored is None else self._top(text, scored)
                for text, scored in zip(tokens, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }

    def prompt(self, parts: Sequence[PromptPart]) -> list[Mapping[str, Any] | None]:
        """vLLM's `prompt_logprobs`: for each token its own entry and the likeliest, by id; None for the first token."""
        return [
            None if scored is None else self._by_id(token_id, scored)
            for part in parts
            for token_id, scored in zip(part.token_ids, part.logprobs or [None] * len(part.token_ids), strict=True)
        ]

    def _by_id(self, token_id: int, scored: TokenLogprob) -> Mapping[str, Any]:
        ranks = {each.token_id: rank for rank, each in enumerate(scored.top, 1)}
        scores = {token_id: scored.logprob} | {each.token_id: each.logprob for each in scored.top}
        return {
            str(each): {"logprob": _finite(score), "rank": ranks.get(each), "decoded_token": self.text(each)}
            for each, score in scores.items()
        }

    def _top(self, text: str, scored: TokenLogprob) -> Mapping[str, float]:
        """The likeliest, and the token itself; of tokens with one text the likeliest counts."""
        top: dict[str, float] = {}
        for each in scored.top:
            top.setdefault(self.text(each.token_id), _finite(each.logprob))
        top.setdefault(text, _finite(scored.logprob))
        return top

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.text(token_id),
            "logprob": _finite(logprob),
            "bytes": list(self._spelling[token_id]),
        }


def _finite(logprob: float) -> float:
    return max(_LEAST, logprob)
