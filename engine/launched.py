"""A step whose device may still be at work: what it draws, for the next step at once, for the host when it is asked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.finite import finite_marks
from engine.plan import Chunk, ChunkResult, Computed, Drawn, NonFinite


@dataclass(frozen=True, slots=True)
class Launched:
    """`tokens`: int64 `[chunks]` on the device, what each chunk drew; means something for chunks with one sample."""

    tokens: torch.Tensor
    results: Callable[[], tuple[ChunkResult, ...]]
    """Waits for the device. One per chunk, in their order; empty for a chunk that draws nothing."""


def launched_with(results: tuple[ChunkResult, ...], device: torch.device) -> Launched:
    """Of a step that the host has waited for already."""
    first = [each.drawn[0].token_id if isinstance(each, Computed) and each.drawn else 0 for each in results]
    return Launched(torch.tensor(first, device=device), lambda: results)


def is_all_greedy(chunks: Sequence[Chunk]) -> bool:
    """Whether the likeliest token of every chunk's last row is all that is asked for."""
    return all(
        len(chunk.samples) == 1
        and chunk.scored is None
        and chunk.samples[0].params.greedy
        and chunk.samples[0].params.drawn_alone
        for chunk in chunks
    )


def launch_greedy(hidden: torch.Tensor, logits: torch.Tensor, chunk_of_row: Sequence[int]) -> Launched:
    """hidden: `[rows, size]`; logits: float32 `[chunks, vocab]`; nothing of them is looked at on the host."""
    tokens = logits.argmax(-1)
    chosen = logits.gather(-1, tokens[:, None])[:, 0]
    logprobs = chosen - logits.logsumexp(-1)
    finite = finite_marks(logits)
    spoilt = ~finite_marks(hidden)
    chunks = torch.tensor(chunk_of_row).to(logits.device, non_blocking=True)
    finite &= ~torch.zeros_like(finite, dtype=torch.int32).index_add_(0, chunks, spoilt.int()).bool()
    fetched = _Fetched(tokens, logprobs, finite)
    return Launched(tokens, fetched.results)


class _Fetched:
    """Copies under way to the host, and the event behind them."""

    def __init__(self, tokens: torch.Tensor, logprobs: torch.Tensor, finite: torch.Tensor) -> None:
        self._parts = [part.to("cpu", non_blocking=True) for part in (tokens, logprobs, finite)]
        self._done = torch.cuda.Event() if tokens.is_cuda else None
        if self._done is not None:
            self._done.record()

    def results(self) -> tuple[ChunkResult, ...]:
        if self._done is not None:
            self._done.synchronize()
        tokens, logprobs, finite = (part.tolist() for part in self._parts)
        return tuple(
            Computed((Drawn(token, logprob),)) if sound else NonFinite()
            for token, logprob, sound in zip(tokens, logprobs, finite, strict=True)
        )
