"""Requests, the plan of each step, its results, and the outcomes: the values that scheduler and runner exchange.

A scheduler decides a plan and the runner carries it out. A prefill chunk and a decode step are the same thing, tokens
of one sequence at known positions; they differ in how many tokens there are and how many samples are drawn from the
last one's logits.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.engine.kv_cache.sessions import SessionTurn
from baton.engine.sampling.params import SamplingParams
from baton.text.pooling import Pooling

UNKNOWN = 0  # stands for a token that is not drawn yet


@dataclass(frozen=True, slots=True)
class Sample:
    """One token to draw from the logits of a chunk's last token.

    Where `params.needs_history`, `history` is the prompt and then all tokens of this choice so far: as many as the
    position of the token that is drawn. It is read while the plan runs; a list may grow afterwards.
    """

    choice: int
    params: SamplingParams
    history: Sequence[int] = ()
    prompt_tokens: int = 0  # of `history`
    drafted_tokens: int = 0  # of `history`, at its end: they are taken to come, and may not


@dataclass(frozen=True, slots=True)
class Scored:
    """Tokens of the prompt whose log-probabilities are reported: those one place after a chunk's own, in order.

    As many as the chunk has, or one fewer where it ends the prompt. Each comes with the `top` likeliest in its place.
    """

    token_ids: Sequence[int]
    top: int


@dataclass(frozen=True, slots=True)
class Pooled:
    """What is summed up over some tokens of a chunk, counted from its first: hidden states, or logits."""

    rows: range
    head_token_ids: tuple[int, ...] = ()  # whose logits; none: hidden states
    second_from: int | None = None  # as in Pooling


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence to be computed in one step.

    The tokens stand at positions [start, start + len(token_ids)). KV of [0, start) is already in the blocks of
    `block_table`, which covers positions up to the last token of this chunk.
    """

    request_id: int
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]  # physical block of each logical block
    samples: tuple[Sample, ...] = ()  # empty: only fills KV
    scored: Scored | None = None
    pooled: Pooled | None = None
    adapter: int = 0  # number of a loaded adapter, see engine/lora/adapters.py; 0: none
    follows: int | None = None  # chunk of the plan before whose one drawn token is this one's token, UNKNOWN until then
    is_draft: bool = False
    """Its one token may be wrong: where the chunk before it in the plan draws another, its result means nothing."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class BlockSwap:
    """A block of the pool and the slot of host memory that its bytes go to or come from."""

    block: int
    host_slot: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. Before anything is computed blocks are moved: `swaps_out`, then `swaps_in`, then `copies`.

    `copies` are for copy on write. A step without chunks only moves blocks.
    """

    chunks: tuple[Chunk, ...]
    copies: tuple[BlockCopy, ...] = ()
    swaps_out: tuple[BlockSwap, ...] = ()  # to host memory
    swaps_in: tuple[BlockSwap, ...] = ()  # from there

    @property
    def tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def prompt_tokens(self) -> int:
        """Of those, the ones that do not each draw the next token of an answer: of prompts, or computed again."""
        return sum(len(chunk.token_ids) for chunk in self.chunks if len(chunk.token_ids) > 1 or not chunk.samples)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token that might have been drawn, and the log-probability the model gave it."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token and the log-probability the model gave it (before penalties, temperature and filters)."""

    token_id: int
    logprob: float
    top: tuple[TokenLogprob, ...] = ()  # as many as were asked for, likeliest first; of equal ones the smaller id first


@dataclass(frozen=True, slots=True)
class NonFinite:
    """The logits of this chunk were not finite, or no token was left to draw once its request's masks and biases were
    applied: its request fails, its KV is never published.
    """

    cause: str = ""  # where it was not the model: why the form of the answer could not be followed
    kv_suspect: bool = field(default=False, compare=False)
    """The model's values were so before any mask or bias: some of the KV that it read may be spoilt."""


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of a chunk."""

    drawn: tuple[Drawn, ...] = ()  # one per sample of the chunk, in order
    prompt: tuple[Drawn, ...] = ()  # one per token of `Chunk.scored`, in order
    pooled: tuple[float, ...] = ()  # of `Chunk.pooled`
    late: bool = False  # its mask was not ready in time: nothing was drawn, and its last token is computed again


ChunkResult = Computed | NonFinite


def pooled(pooling: Pooling | None, start: int, end: int, prompt_tokens: int) -> Pooled | None:
    """What a chunk over [start, end) of a prompt adds to its vector; None: nothing."""
    rows = range(0) if pooling is None else pooling.rows(start, end, prompt_tokens)
    return Pooled(rows, pooling.head_token_ids, pooling.second_from) if pooling is not None and rows else None


def scored(token_ids: Sequence[int], start: int, end: int, top: int | None) -> Scored | None:
    """The tokens of the prompt `token_ids` that a chunk over [start, end) scores; `top` as the request asks."""
    following = token_ids[start + 1 : end + 1]
    return None if top is None or not following else Scored(following, top)


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
    turn: SessionTurn | None = None  # of the session that it is of
    pooling: Pooling | None = None
    """The prompt is computed for a vector, and nothing is drawn: it is `prefill_only`, and ends with its prompt."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.token_ids) - self.answered_tokens

    @property
    def longest_tokens(self) -> int:
        """Prompt and answer of one choice, where nothing but `max_tokens` ends it."""
        return self.prompt_tokens + self.params.max_tokens

    @property
    def needs_every_token(self) -> bool:
        """The prompt's tokens are scored, or all pooled: nothing of it is taken from a cache."""
        pools_all = self.pooling is not None and not self.pooling.reuses_prefix
        return pools_all or self.params.prompt_logprobs is not None

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

    blocks: tuple[int, ...]  # that the whole prompt needs, in order
    cached_blocks: int
    cached_tokens: int = 0


def end_reason(params: SamplingParams, token_id: int, offset: int) -> EndReason | None:
    """Why an answer ends with the token at `offset` (from 0), or None if it continues."""
    if token_id in params.stop_token_ids:
        return EndReason.STOP
    return EndReason.LENGTH if offset + 1 >= params.max_tokens else None


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Blocks that hold the KV of so many tokens."""
    return -(-tokens // block_tokens)


def reusable_hashes(request: Request, block_tokens: int) -> tuple[bytes, ...]:
    """Hashes that may be looked up: those before the block of the last prompt token, whose logits are needed; none
    where every token's result is wanted.
    """
    if request.needs_every_token:
        return ()
    return request.block_hashes[: (len(request.token_ids) - 1) // block_tokens]


def check_request(request: Request, block_tokens: int) -> None:
    """Raises: RequestRefused for a request that no scheduler can compute."""
    complete_blocks = len(request.token_ids) // block_tokens
    if not request.token_ids:
        raise RequestRefused("the prompt has no tokens")
    if request.params.n < 1 or request.params.max_tokens < 1:
        raise RequestRefused("n and max_tokens are at least 1")
    if request.pooling is not None and not (request.prefill_only and request.params.n == 1):
        raise RequestRefused("a prompt that is pooled is computed alone, without an answer")
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


_MASK = (1 << 64) - 1
MIX_STEP, MIX_FIRST, MIX_SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits for one token of one choice, by counter, not by state.

    The same request draws the same token on any worker, in any batch.

    seed: 64 bits (taken modulo 2**64); choice: index among the request's choices; position: absolute position of the
    token that is drawn. Each is mixed in by the finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable
    Pseudorandom Number Generators, 2014), so that neighbouring seeds, choices and positions are unrelated.
    """
    state = mix(seed)
    state = mix(state ^ choice)
    state = mix(state ^ position)
    return (state >> 11) * 2.0**-53


def mix(value: int) -> int:
    """SplitMix64's finaliser, which can be undone: a permutation of the numbers of 64 bits."""
    value = (value + MIX_STEP) & _MASK
    value = ((value ^ (value >> 30)) * MIX_FIRST) & _MASK
    value = ((value ^ (value >> 27)) * MIX_SECOND) & _MASK
    return value ^ (value >> 31)
