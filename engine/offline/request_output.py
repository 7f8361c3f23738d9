"""The result of an offline request. Names and fields are vLLM's."""

from dataclasses import dataclass


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
