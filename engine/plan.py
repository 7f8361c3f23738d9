"""The work of one engine step: decided by a scheduler, carried out by the runner.

A prefill chunk and a decode step are the same thing, tokens of one sequence at known positions; they differ in how
many tokens there are and how many samples are drawn from the last one's logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.engine.sampling.params import SamplingParams

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


@dataclass(frozen=True, slots=True)
class Scored:
    """Tokens of the prompt whose log-probabilities are reported: those one place after a chunk's own, in order.

    As many as the chunk has, or one fewer where it ends the prompt. Each comes with the `top` likeliest in its place.
    """

    token_ids: Sequence[int]
    top: int


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
    adapter: int = 0  # number of a loaded adapter, see engine/lora/adapters.py; 0: none
    follows: int | None = None  # chunk of the plan before whose one drawn token is this one's token, UNKNOWN until then

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
    late: bool = False  # its mask was not ready in time: nothing was drawn, and its last token is computed again


ChunkResult = Computed | NonFinite


def scored(token_ids: Sequence[int], start: int, end: int, top: int | None) -> Scored | None:
    """The tokens of the prompt `token_ids` that a chunk over [start, end) scores; `top` as the request asks."""
    following = token_ids[start + 1 : end + 1]
    return None if top is None or not following else Scored(following, top)
