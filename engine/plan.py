"""What one engine step computes: decided by a scheduler, carried out by the runner.

A prefill chunk and a decode step are the same thing, tokens of one sequence at known positions; they differ in how
many tokens there are and how many samples are drawn from the last one's logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.sampling_params import SamplingParams


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

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. `copies` are carried out before anything is computed (copy on write)."""

    chunks: tuple[Chunk, ...]
    copies: tuple[BlockCopy, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token that might have been drawn, and the log-probability the model gave it."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Drawn:
    """A sampled token and the log-probability the model gave it (before penalties, temperature and filters)."""

    token_id: int
    logprob: float
    top: tuple[TokenLogprob, ...] = ()  # the `params.logprobs` likeliest first; of equal ones the smaller id first


@dataclass(frozen=True, slots=True)
class NonFinite:
    """The logits of this chunk were not finite, or no token was left to draw once its request's masks and biases were
    applied: its request fails, its KV is never published.
    """


ChunkResult = tuple[Drawn, ...] | NonFinite
"""One entry per sample of the chunk, in order."""
