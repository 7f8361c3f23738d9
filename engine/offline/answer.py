"""One request being answered: tokens in, text and RequestOutput out. Pure but for the tokenizer.

Names and fields of the outputs are vLLM's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.engine.offline.params import SamplingParams
from baton.engine.offline.prompts import Prompt, TextDecoder
from baton.engine.request import Drawn, EndReason
from baton.engine.scheduler.sequences import TokenMade
from baton.text.detokenizer import Detokenizer
from baton.text.sampling import mean_logprob
from baton.text.stop_strings import find_stop


@dataclass(frozen=True, slots=True)
class Logprob:
    """The model's log-probability of a token. `rank` counts from 1; None: below those that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer, as far as it is."""

    index: int  # of the choice
    text: str
    token_ids: list[int]  # with the token that ended it, and with those of a stop string
    cumulative_logprob: float
    logprobs: list[dict[int, Logprob]] | None  # per token, where asked for
    finish_reason: str | None  # stop, length, abort, or error (logits that were not finite); None: not ended
    stop_reason: int | str | None  # the stop token or stop string of the caller that ended it

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One request with all its answers."""

    request_id: str
    prompt: str | None  # None where token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]  # in order of index; with best_of the best first, and none before all have ended
    finished: bool
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # per token, where asked for; None of the first


@dataclass(slots=True)
class ChoiceAnswer:
    """One choice as far as it is. `detokenizer` is None where text is not needed before the end."""

    detokenizer: Detokenizer | None
    drawn: list[Drawn] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.drawn]


class LlmAnswer:
    """All choices of one request. `streams`: outputs are read before the end, so text is made token by token."""

    def __init__(
        self, request_id: str, prompt: Prompt, params: SamplingParams, decoder: TextDecoder, streams: bool
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self._params = params
        self._stops = params.stops
        self._decoder = decoder
        self._cached_tokens = 0
        self._prompt: list[Drawn] = []  # from the second token on, where asked for
        grows = params.detokenize and (streams or bool(self._stops))
        skip = params.skip_special_tokens
        self._choices = [ChoiceAnswer(decoder.detokenizer(skip) if grows else None) for _ in range(params.choices)]

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self._choices)

    @property
    def made_tokens(self) -> int:
        return sum(len(choice.drawn) for choice in self._choices)

    def take_prompt(self, scores: Sequence[Drawn]) -> None:
        """Log-probabilities of the next tokens of the prompt."""
        self._prompt += scores

    def take(self, made: TokenMade) -> bool:
        """Adds a token. True: a stop string ended the choice, of which the engine is to make no more."""
        choice = self._choices[made.choice]
        if choice.finish_reason is not None:
            return False
        self._cached_tokens = made.cached_tokens
        choice.drawn.append(made.drawn)
        hidden = made.end is EndReason.STOP  # a stop token is part of the answer, not of its text
        stopped = self._grow(choice, None if hidden else made.drawn.token_id, ends=made.end is not None)
        if not stopped and made.end is not None:
            self._end(choice, made.end, made.drawn.token_id)
        return stopped and made.end is None

    def fail(self) -> None:
        """The logits were not finite, or nothing was left to draw: unfinished choices end so."""
        self._finish_all("error")

    def give_up(self) -> None:
        """The caller wants no more of it."""
        self._finish_all("abort")

    def output(self) -> RequestOutput:
        outputs = [self._completion(index, choice) for index, choice in enumerate(self._chosen())]
        prompt = self.prompt
        return RequestOutput(
            self.request_id,
            prompt.text,
            list(prompt.token_ids),
            outputs,
            self.finished,
            self._cached_tokens,
            None if self._params.prompt_logprobs is None else [None, *map(self._logprobs, self._prompt)],
        )

    def _chosen(self) -> list[ChoiceAnswer]:
        """The choices that are shown: which ones is known only at the end where there are more than were asked for."""
        if self._params.choices == self._params.n:
            return self._choices
        return sorted(self._choices, key=_score, reverse=True)[: self._params.n] if self.finished else []

    def _finish_all(self, reason: str) -> None:
        for choice in self._choices:
            if choice.finish_reason is None:
                choice.finish_reason = reason

    def _grow(self, choice: ChoiceAnswer, token_id: int | None, ends: bool) -> bool:
        """Adds a token's text. Returns whether a stop string ended the choice with it."""
        detokenizer = choice.detokenizer
        if detokenizer is None:
            return False
        known = len(choice.text)
        if token_id is not None:
            choice.text += detokenizer.push(token_id)
        if ends:
            choice.text += detokenizer.finish()
        if len(choice.drawn) <= self._params.min_tokens:
            return False
        stop = find_stop(choice.text, known, self._stops)
        if stop is None:
            return False
        kept = stop.begin + len(stop.text) if self._params.include_stop_str_in_output else stop.begin
        choice.text = choice.text[:kept]
        choice.finish_reason, choice.stop_reason = "stop", stop.text
        return True

    def _end(self, choice: ChoiceAnswer, end: EndReason, last_token: int) -> None:
        choice.finish_reason = end.value
        if end is EndReason.STOP and last_token in (self._params.stop_token_ids or ()):
            choice.stop_reason = last_token
        if choice.detokenizer is None and self._params.detokenize:
            shown = choice.token_ids[:-1] if end is EndReason.STOP else choice.token_ids
            choice.text = self._decoder.decode(shown, self._params.skip_special_tokens)

    def _completion(self, index: int, choice: ChoiceAnswer) -> CompletionOutput:
        # Text that may become part of a stop string is not shown before it is certain.
        held = 0 if choice.finish_reason is not None else max((len(stop) - 1 for stop in self._stops), default=0)
        return CompletionOutput(
            index=index,
            text=choice.text[: max(0, len(choice.text) - held)],
            token_ids=choice.token_ids,
            cumulative_logprob=sum(token.logprob for token in choice.drawn),
            logprobs=None if self._params.logprobs is None else [self._logprobs(token) for token in choice.drawn],
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )

    def _logprobs(self, drawn: Drawn) -> dict[int, Logprob]:
        """The likeliest tokens by rank, and the one that is there."""
        by_token_id = {
            top.token_id: Logprob(top.logprob, rank, self._decoder.decode((top.token_id,), False))
            for rank, top in enumerate(drawn.top, start=1)
        }
        if drawn.token_id not in by_token_id:
            by_token_id[drawn.token_id] = Logprob(drawn.logprob, None, self._decoder.decode((drawn.token_id,), False))
        return by_token_id


def _score(choice: ChoiceAnswer) -> float:
    """Score of a choice among the candidates of best_of; -inf after a failure."""
    return -math.inf if choice.finish_reason == "error" else mean_logprob([token.logprob for token in choice.drawn])
