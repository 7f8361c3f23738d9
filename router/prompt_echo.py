"""The prompt, sent back to the client that asked for it: in parts, each position once, even if attempts repeat it."""

from dataclasses import dataclass

from router.events import PromptScores, TokenLogprob

PART_TOKENS = 1024  # bounds a message: at most 20 likeliest tokens come with each


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Tokens of the prompt from `offset` on. `logprobs` has one entry per token, or none."""

    offset: int
    token_ids: tuple[int, ...]
    text: str = ""  # of the whole prompt, with the first part
    logprobs: tuple[TokenLogprob, ...] = ()


class PromptEcho:
    """The part still to be sent. With `scored`, tokens come with their scores; the first one, which has none, alone."""

    def __init__(self, token_ids: tuple[int, ...], text: str, scored: bool, told: int = 0) -> None:
        """`told`: so many tokens, with the text, were sent over another stream."""
        self._token_ids = token_ids
        self._text = text
        self._scored = scored
        self._told = told

    def take(self, scores: PromptScores) -> tuple[PromptPart, ...]:
        """The parts that these scores make known; none where another attempt already made them known."""
        parts = self._first()
        new = scores.logprobs[self._told - scores.offset :]
        return parts + self._parts(self._told + len(new), new)

    def rest(self) -> tuple[PromptPart, ...]:
        """All that was not sent: to be called when every score was taken, or none is wanted."""
        return self._first() if self._scored else self._parts(len(self._token_ids), ())

    def _first(self) -> tuple[PromptPart, ...]:
        return self._parts(max(1, self._told), ())

    def _parts(self, end: int, logprobs: tuple[TokenLogprob, ...]) -> tuple[PromptPart, ...]:
        begin, self._told = self._told, end
        return tuple(
            PromptPart(
                offset,
                self._token_ids[offset : min(offset + PART_TOKENS, end)],
                self._text if offset == 0 else "",
                logprobs[offset - begin : offset - begin + PART_TOKENS],
            )
            for offset in range(begin, end, PART_TOKENS)
        )
