"""What a scheduler is asked for, what it answers, and when an answer ends. The same words on both kinds of worker."""

import enum
from dataclasses import dataclass

from engine.plan import TokenLogprob
from engine.sampling_params import SamplingParams


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
    """A prompt and how to answer it. `request_id` is the caller's, unique among the requests of one scheduler."""

    request_id: int
    token_ids: tuple[int, ...]
    params: SamplingParams
    block_hashes: tuple[bytes, ...]  # one per complete block of the prompt, chained; or none: keep out of the cache
    adapter: int = 0  # as in Chunk; the hashes' root covers which it is


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Token 0 of one choice, made by prefill. `end` is set where the answer is no longer than that."""

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
    """Why an answer ends with the token at `offset` (from 0), or None if it goes on."""
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
    """Raises: RequestRefused for what no scheduler can make sense of."""
    complete_blocks = len(request.token_ids) // block_tokens
    if not request.token_ids:
        raise RequestRefused("the prompt has no tokens")
    if request.params.n < 1 or request.params.max_tokens < 1:
        raise RequestRefused("n and max_tokens are at least 1")
    if request.block_hashes and len(request.block_hashes) != complete_blocks:
        raise RequestRefused(f"{len(request.block_hashes)} block hashes for {complete_blocks} complete blocks")
