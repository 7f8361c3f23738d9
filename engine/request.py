"""A scheduler's requests and outcomes, and when an answer ends. The same types on both kinds of worker."""

import enum
from dataclasses import dataclass

from baton.engine.plan import TokenLogprob
from baton.engine.sampling.params import SamplingParams


class EndReason(enum.Enum):
    STOP = "stop"  # a token of stop_token_ids, which is the last of the answer
    LENGTH = "length"  # max_tokens reached


class RequestRefused(ValueError):
    """The request can never run here. Nothing was taken for it."""


class RequestTooLong(RequestRefused):
    """The request does not fit even into an empty pool or batch."""


class UnknownRequest(KeyError):
    """No request of this id is in the phase that the call is for."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how to answer it. `request_id` is the caller's, unique among the requests of one scheduler.

    With `answered_tokens` it continues an answer that was begun elsewhere, of which one choice is made: the tokens are
    those that would have come there. They count in `max_tokens` and `min_tokens`; offsets begin after them.
    """

    request_id: int
    token_ids: tuple[int, ...]  # the prompt, and then the answered tokens
    params: SamplingParams
    block_hashes: tuple[bytes, ...]  # one per complete block of `token_ids`, chained; or none: keep out of the cache
    adapter: int = 0  # as in Chunk; the hashes' root covers which it is
    answered_tokens: int = 0
    first_choice: int = 0  # choices are numbered from here, and draw by that number
    prefill_only: bool = False
    """First tokens are drawn here and no others: then the prompt's blocks stay pinned until it is aborted."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.token_ids) - self.answered_tokens

    @property
    def longest_tokens(self) -> int:
        """Prompt and answer of one choice, where nothing but `max_tokens` ends it."""
        return self.prompt_tokens + self.params.max_tokens

    @property
    def first_choices(self) -> range:
        """Choices whose next token is drawn from the logits of the last of `token_ids`."""
        return range(self.first_choice, self.first_choice + self.params.first_draws)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token that is made of one choice, by prefill. `end` is set where the answer goes no further."""

    choice: int
    token_id: int
    logprob: float
    end: EndReason | None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks that a prompt's KV is to be copied into. The first `cached_blocks` hold it already: leave them alone."""

    blocks: tuple[int, ...]  # of the whole prompt, in order
    cached_blocks: int


def end_reason(params: SamplingParams, token_id: int, offset: int) -> EndReason | None:
    """Why an answer ends with the token at `offset` (from 0), or None if it continues."""
    if token_id in params.stop_token_ids:
        return EndReason.STOP
    return EndReason.LENGTH if offset + 1 >= params.max_tokens else None


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Blocks that hold the KV of so many tokens."""
    return -(-tokens // block_tokens)


def reusable_hashes(request: Request, block_tokens: int) -> tuple[bytes, ...]:
    """Hashes that may be looked up: those before the block of the last prompt token, whose logits are needed."""
    return request.block_hashes[: (len(request.token_ids) - 1) // block_tokens]


def check_request(request: Request, block_tokens: int) -> None:
    """Raises: RequestRefused for a request that no scheduler can compute."""
    complete_blocks = len(request.token_ids) // block_tokens
    if not request.token_ids:
        raise RequestRefused("the prompt has no tokens")
    if request.params.n < 1 or request.params.max_tokens < 1:
        raise RequestRefused("n and max_tokens are at least 1")
    if request.answered_tokens:
        _check_answered(request)
    if request.block_hashes and len(request.block_hashes) != complete_blocks:
        raise RequestRefused(f"{len(request.block_hashes)} block hashes for {complete_blocks} complete blocks")


def _check_answered(request: Request) -> None:
    """Raises: RequestRefused."""
    params, answered_tokens = request.params, request.answered_tokens
    if not 0 < answered_tokens < min(len(request.token_ids), params.max_tokens):
        raise RequestRefused(f"{answered_tokens} answered tokens leave no prompt, or nothing to answer")
    if params.n != 1 or params.beam is not None or params.prompt_logprobs is not None:
        raise RequestRefused("an answer that goes on is one choice, without beams or scores of the prompt")
