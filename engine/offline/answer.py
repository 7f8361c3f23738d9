"""Answer of one offline request: converts tokens to text and to a RequestOutput. Names and fields are vLLM's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.engine.offline.params import SamplingParams
from baton.engine.offline.prompts import Prompt, TextDecoder
from baton.engine.request import Drawn, EndReason
from baton.engine.scheduler.sequences import TokenMade
from baton.text.detokenizer import Detokenizer
from baton.text.sampling import mean_logprob
from baton.text.stop_strings import StopFilter


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token. `rank` counts from 1; None if the token is not among the requested top tokens."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """Output of one choice so far."""

    index: int  # index of the choice
    text: str
    token_ids: list[int]  # including the final stop token, or the tokens of the stop string
    cumulative_logprob: float
    logprobs: list[dict[int, Logprob]] | None  # one per token; None unless requested
    finish_reason: str | None  # stop, length, abort or error (non-finite logits); None while running
    stop_reason: int | str | None  # the caller's stop token or stop string that ended the choice

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Output of a request, with all its choices."""

    request_id: str
    prompt: str | None  # None for a prompt of token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]  # in index order; with best_of: best first, empty until all choices finish
    finished: bool
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    prompt_logprobs: list[dict[int, Logprob] | None] | None = (
        None  # one per prompt token, None for the first token; None unless requested
    )


@dataclass(slots=True)
class ChoiceAnswer:
    """State of one choice. `detokenizer`: None if the text is not decoded token by token."""

    detokenizer: Detokenizer | None
    stop_filter: StopFilter
    drawn: list[Drawn] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.drawn]


class LlmAnswer:
    """Choices of one request. `streams`: decode each token, because the caller reads partial outputs."""

    def __init__(
        self, request_id: str, prompt: Prompt, params: SamplingParams, decoder: TextDecoder, streams: bool
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self._params = params
        self._decoder = decoder
        self._cached_tokens = 0
        self._prompt: list[Drawn] = []  # log-probabilities of prompt tokens, from the second token on
        grows = params.detokenize and (streams or bool(params.stops))
        skip = params.skip_special_tokens
        self._choices = [
            ChoiceAnswer(decoder.detokenizer(skip) if grows else None, StopFilter(params.stops, params.min_tokens))
            for _ in range(params.choices)
        ]

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self._choices)

    @property
    def made_tokens(self) -> int:
        return sum(len(choice.drawn) for choice in self._choices)

    def take_prompt(self, scores: Sequence[Drawn]) -> None:
        """Add log-probabilities of the next prompt tokens."""
        self._prompt += scores

    def take(self, made: TokenMade) -> bool:
        """Add a token to its choice. Return True if the engine must stop the choice because a stop string matched."""
        choice = self._choices[made.choice]
        if choice.finish_reason is not None:
            return False
        self._cached_tokens = made.cached_tokens
        choice.drawn.append(made.drawn)
        hidden = made.end is EndReason.STOP  # a stop token is in token_ids, but not in the text
        stopped = self._grow(choice, None if hidden else made.drawn.token_id, ends=made.end is not None)
        if not stopped and made.end is not None:
            self._end(choice, made.end, made.drawn.token_id)
        return stopped and made.end is None

    def fail(self) -> None:
        """Finish all running choices with "error": logits were not finite, or no token could be sampled."""
        self._finish_all("error")

    def give_up(self) -> None:
        """Finish all running choices with "abort": the caller aborted the request."""
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
        """Return the choices to output. With best_of: the n best, or none until all choices have finished."""
        if self._params.choices == self._params.n:
            return self._choices
        return sorted(self._choices, key=_score, reverse=True)[: self._params.n] if self.finished else []

    def _finish_all(self, reason: str) -> None:
        for choice in self._choices:
            if choice.finish_reason is None:
                choice.text += choice.stop_filter.finish("").text
                choice.finish_reason = reason

    def _grow(self, choice: ChoiceAnswer, token_id: int | None, ends: bool) -> bool:
        """Append a token's text to the choice. Return whether a stop string ended the choice."""
        detokenizer, stop_filter = choice.detokenizer, choice.stop_filter
        if detokenizer is None:
            return False
        if token_id is not None:
            choice.text += stop_filter.push(token_id, detokenizer.push(token_id)).text
        if ends:
            choice.text += stop_filter.finish(detokenizer.finish()).text
        if stop_filter.matched is None:
            return False
        if self._params.include_stop_str_in_output:
            choice.text += stop_filter.matched
        choice.finish_reason, choice.stop_reason = "stop", stop_filter.matched
        return True

    def _end(self, choice: ChoiceAnswer, end: EndReason, last_token: int) -> None:
        choice.finish_reason = end.value
        if end is EndReason.STOP and last_token in (self._params.stop_token_ids or ()):
            choice.stop_reason = last_token
        if choice.detokenizer is None and self._params.detokenize:
            shown = choice.token_ids[:-1] if end is EndReason.STOP else choice.token_ids
            choice.text = self._decoder.decode(shown, self._params.skip_special_tokens)

    def _completion(self, index: int, choice: ChoiceAnswer) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text=choice.text,
            token_ids=choice.token_ids,
            cumulative_logprob=sum(token.logprob for token in choice.drawn),
            logprobs=None if self._params.logprobs is None else [self._logprobs(token) for token in choice.drawn],
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )

    def _logprobs(self, drawn: Drawn) -> dict[int, Logprob]:
        """Return log-probabilities by token id: the likeliest tokens in rank order, and the sampled token."""
        by_token_id = {
            top.token_id: Logprob(top.logprob, rank, self._decoder.decode((top.token_id,), False))
            for rank, top in enumerate(drawn.top, start=1)
        }
        if drawn.token_id not in by_token_id:
            by_token_id[drawn.token_id] = Logprob(drawn.logprob, None, self._decoder.decode((drawn.token_id,), False))
        return by_token_id


def _score(choice: ChoiceAnswer) -> float:
    """Return a choice's mean log-probability, which ranks choices for best_of; -inf if the choice failed."""
    return -math.inf if choice.finish_reason == "error" else mean_logprob([token.logprob for token in choice.drawn])
