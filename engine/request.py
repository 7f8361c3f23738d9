"""Requests, plans of steps, and results: the values that scheduler and runner exchange.

A scheduler decides a plan and the runner executes it. A prefill chunk and a decode step are the same: tokens of one
sequence at known positions. They differ in the number of tokens, and in the number of samples drawn at the last token.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, NamedTuple

from baton.engine.kv_cache.sessions import SessionTurn
from baton.engine.sampling.params import SamplingParams
from baton.text.pooling import Pooling

UNKNOWN_TOKEN = (0,)  # tokens of a chunk whose token is not sampled yet


class Sample(NamedTuple):
    """Token to sample from the logits of a chunk's last token.

    If `params.needs_history`, `history` is the prompt and all tokens of this choice so far; their number is the
    position of the sampled token. `history` is read while the plan runs: a list may grow only afterwards.
    """

    choice: int
    params: SamplingParams
    history: Sequence[int] = ()
    prompt_tokens: int = 0  # number of prompt tokens at the start of `history`
    drafted_tokens: int = 0  # number of draft tokens at the end of `history`, not yet verified


@dataclass(frozen=True, slots=True)
class Scored:
    """Prompt tokens whose log-probabilities a chunk computes: the successor of each token of the chunk, in order.

    The last token of the prompt has no successor. Each token is reported with the `top` most likely alternatives.
    """

    token_ids: Sequence[int]
    top: int


@dataclass(frozen=True, slots=True)
class Pooled:
    """Rows of a chunk whose hidden states or logits are summed. Row 0 is the chunk's first token."""

    rows: range
    head_token_ids: tuple[int, ...] = ()  # tokens whose logits are summed; empty: hidden states are summed
    second_from: int | None = None  # first row of the second text, if the prompt is a pair of texts; None otherwise


class Chunk(NamedTuple):
    """Tokens of one sequence to compute in one step.

    Positions are [start, start + len(token_ids)). KV of [0, start) is already in the blocks of `block_table`, which
    covers positions up to the last token.
    """

    request_id: int
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]  # block id of each logical block
    samples: tuple[Sample, ...] = ()  # empty: the chunk only writes KV
    scored: Scored | None = None
    pooled: Pooled | None = None
    adapter: int = 0  # number of a loaded adapter, see engine/lora/adapters.py; 0: none
    follows: int | None = None  # index of the chunk in the previous plan that samples this chunk's UNKNOWN_TOKEN
    is_draft: bool = False
    """Whether the token is a draft: the result is void if the plan's preceding chunk samples another token."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class BlockSwap:
    """Copy of a block between the pool and a slot of host memory."""

    block: int
    host_slot: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Work of one step. Blocks are moved before chunks are computed: `swaps_out`, then `swaps_in`, then `copies`.

    `copies` are for copy-on-write. A step without chunks only moves blocks.
    """

    chunks: tuple[Chunk, ...]
    copies: tuple[BlockCopy, ...] = ()
    swaps_out: tuple[BlockSwap, ...] = ()  # copies from the pool to host memory
    swaps_in: tuple[BlockSwap, ...] = ()  # copies from host memory to the pool
    tokens: int = field(init=False, compare=False)
    prompt_tokens: int = field(init=False, compare=False)
    """Number of tokens of prompts and of recomputed sequences, without decode tokens."""

    def __post_init__(self) -> None:
        others = [len(each.token_ids) for each in self.chunks if len(each.token_ids) != 1 or not each.samples]
        object.__setattr__(self, "prompt_tokens", sum(others))
        object.__setattr__(self, "tokens", len(self.chunks) - len(others) + sum(others))


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Candidate token and its log-probability."""

    token_id: int
    logprob: float


class Drawn(NamedTuple):
    """Sampled token and its log-probability before penalties, temperature and filters."""

    token_id: int
    logprob: float
    top: tuple[TokenLogprob, ...] = ()  # most likely candidates, best first; ties are ordered by token id


@dataclass(frozen=True, slots=True)
class NonFinite:
    """Failed chunk: non-finite logits, or no token left after masks. The chunk's KV is never published."""

    cause: str = ""  # why the answer could not follow its grammar; empty for another failure
    kv_suspect: bool = field(default=False, compare=False)
    """Whether logits were non-finite before any mask or bias: KV that the chunk read may be corrupt."""
    late: ClassVar[bool] = False


class Computed(NamedTuple):
    drawn: tuple[Drawn, ...] = ()  # one per sample, in order
    prompt: tuple[Drawn, ...] = ()  # one per token of `Chunk.scored`, in order
    pooled: tuple[float, ...] = ()  # sums over the rows of `Chunk.pooled`
    late: bool = False  # the grammar mask came too late to sample; the next step repeats the last token


ChunkResult = Computed | NonFinite


def computed_token(token_id: int, logprob: float) -> Computed:
    """Return the result of a chunk with one sample, in half the time of calling the types."""
    drawn = tuple.__new__(Drawn, (token_id, logprob, ()))
    return tuple.__new__(Computed, ((drawn,), (), (), False))


def pooled(pooling: Pooling | None, start: int, end: int, prompt_tokens: int) -> Pooled | None:
    """Return the rows that a chunk over [start, end) of a prompt adds to the pooled vector; None if there are none."""
    rows = range(0) if pooling is None else pooling.rows(start, end, prompt_tokens)
    return Pooled(rows, pooling.head_token_ids, pooling.second_from) if pooling is not None and rows else None


def scored(token_ids: Sequence[int], start: int, end: int, top: int | None) -> Scored | None:
    """Return the prompt tokens that a chunk over [start, end) scores; None if none. `top`: alternatives per token."""
    following = token_ids[start + 1 : end + 1]
    return None if top is None or not following else Scored(following, top)


class EndReason(enum.Enum):
    STOP = "stop"  # the last token of the answer is a stop token
    LENGTH = "length"  # max_tokens was reached


class RequestRefused(ValueError):
    """Rejection of a request that can never run here. Nothing was allocated for it."""


class RequestTooLong(RequestRefused):
    """Rejection of a request that does not fit even into an empty pool or batch."""


class UnknownRequest(KeyError):
    """Error: no request with this id is in the phase that the call requires."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """Latency objectives of one request; infinite: none."""

    first_token_at_s: float = math.inf  # monotonic time by which its first token should exist
    tbt_s: float = math.inf  # longest time between two of its tokens, in seconds
    ttft_s: float = math.inf  # time from its arrival at the router to `first_token_at_s`, in seconds
    deadline_s: float = math.inf  # monotonic time at which the request fails unless it is complete


NO_OBJECTIVES = Objectives()


@dataclass(frozen=True, slots=True)
class Request:
    """Prompt and sampling parameters. `request_id` is unique within one scheduler.

    With `answered_tokens`, it continues one choice that another worker began, and samples the tokens which that worker
    would have sampled. Answered tokens count in `max_tokens` and `min_tokens`; offsets start after them.
    """

    request_id: int
    token_ids: tuple[int, ...]  # prompt, then the answered tokens
    params: SamplingParams
    block_hashes: tuple[bytes, ...]  # one per complete block of `token_ids`, chained; empty: not cached
    adapter: int = 0  # see Chunk; the root of `block_hashes` covers the adapter's identity
    answered_tokens: int = 0
    first_choice: int = 0  # number of the first choice; choice numbers seed the sampling
    prefill_only: bool = False
    """Whether only first tokens are sampled: then the prompt's blocks stay pinned until the request is aborted."""
    turn: SessionTurn | None = None  # turn of a session; None: the request has no session
    pooling: Pooling | None = None
    """Pooling of the prompt: nothing is sampled. The request is `prefill_only` and finishes with its prompt."""
    objectives: Objectives = NO_OBJECTIVES

    @property
    def prompt_tokens(self) -> int:
        return len(self.token_ids) - self.answered_tokens

    @property
    def longest_tokens(self) -> int:
        """Maximum sequence length: tokens of the prompt and `max_tokens` of one choice."""
        return self.prompt_tokens + self.params.max_tokens

    @property
    def needs_every_token(self) -> bool:
        """Return whether every prompt token must be computed, for scores or pooling, and none may come from a cache."""
        pools_all = self.pooling is not None and not self.pooling.reuses_prefix
        return pools_all or self.params.prompt_logprobs is not None

    @property
    def first_choices(self) -> range:
        """Choices whose next token is sampled from the logits of the last token in `token_ids`."""
        return range(self.first_choice, self.first_choice + self.params.first_draws)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """First token of one choice, sampled by prefill. `end`: why the choice has finished; None if not finished."""

    choice: int
    token_id: int
    logprob: float
    end: EndReason | None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks to receive a prompt's KV. The first `cached_blocks` already contain their KV: do not write them."""

    blocks: tuple[int, ...]  # all blocks of the prompt, in order
    cached_blocks: int
    cached_tokens: int = 0


def end_reason(params: SamplingParams, token_id: int, offset: int) -> EndReason | None:
    """Return why an answer ends with the token at `offset` (from 0); None if the answer continues."""
    if token_id in params.stop_token_ids:
        return EndReason.STOP
    return EndReason.LENGTH if offset + 1 >= params.max_tokens else None


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Return the number of blocks for the KV of `tokens` tokens."""
    return -(-tokens // block_tokens)


def reusable_hashes(request: Request, block_tokens: int) -> tuple[bytes, ...]:
    """Return the block hashes to look up in the cache. The last token, or every token if required, is computed."""
    if request.needs_every_token:
        return ()
    return request.block_hashes[: (len(request.token_ids) - 1) // block_tokens]


def check_request(request: Request, block_tokens: int) -> None:
    """Reject requests that no scheduler can compute. Raises: RequestRefused."""
    complete_blocks = len(request.token_ids) // block_tokens
    if not request.token_ids:
        raise RequestRefused("the prompt has no tokens")
    if request.params.n < 1 or request.params.max_tokens < 1:
        raise RequestRefused("n and max_tokens must be at least 1")
    if request.pooling is not None and not (request.prefill_only and request.params.n == 1):
        raise RequestRefused("pooling requires prefill_only and n = 1")
    if request.answered_tokens:
        _check_answered(request)
    if request.block_hashes and len(request.block_hashes) != complete_blocks:
        raise RequestRefused(f"got {len(request.block_hashes)} block hashes for {complete_blocks} complete blocks")


def _check_answered(request: Request) -> None:
    """Check a request that continues an answer. Raises: RequestRefused."""
    params, answered_tokens = request.params, request.answered_tokens
    if not 0 < answered_tokens < min(len(request.token_ids), params.max_tokens):
        raise RequestRefused(
            f"answered_tokens is {answered_tokens}: it must be at least 1, and below the token count and max_tokens"
        )
    if params.n != 1 or params.beam is not None or params.prompt_logprobs is not None:
        raise RequestRefused("a continued answer allows neither n > 1 nor beams nor prompt_logprobs")


_MASK = (1 << 64) - 1
MIX_STEP, MIX_FIRST, MIX_SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def uniform(seed: int, choice: int, position: int) -> float:
    """Return a number in [0, 1) with 53 random bits for one token of one choice, without any generator state.

    The same request samples the same token on any worker, in any batch. seed: 64 bits (modulo 2**64). choice: index of
    the request's choice. position: absolute position of the sampled token. Each is mixed by the finaliser of SplitMix64
    (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), so that neighbouring values are
    unrelated.
    """
    return (mix(_mixed(seed, choice) ^ position) >> 11) * 2.0**-53


@lru_cache(maxsize=4096)
def _mixed(seed: int, choice: int) -> int:
    return mix(mix(seed) ^ choice)


def mix(value: int) -> int:
    """Return SplitMix64's finaliser of a value, a permutation of 64-bit numbers."""
    value = (value + MIX_STEP) & _MASK
    value = ((value ^ (value >> 30)) * MIX_FIRST) & _MASK
    value = ((value ^ (value >> 27)) * MIX_SECOND) & _MASK
    return value ^ (value >> 31)
