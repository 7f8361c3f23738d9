"""Step that the device may still be computing. The next step reads the sampled tokens on the device."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from baton.engine.models.batch import to_device
from baton.engine.request import Chunk, ChunkResult, Computed, Drawn, NonFinite, Sample, uniform
from baton.kernels.sampling import sample_tokens


def finite_rows(rows: torch.Tensor) -> list[bool]:
    """Return which rows of `rows`, `[rows, size]`, are finite, as a list on the host."""
    found: list[bool] = finite_marks(rows).tolist()
    return found


def finite_marks(rows: torch.Tensor) -> torch.Tensor:
    """Return which rows are finite, bool `[rows]`. The sum of `x - x` (0 or NaN) is much faster than isfinite."""
    return (rows - rows).sum(-1) == 0


@dataclass(frozen=True, slots=True)
class Launched:
    """Launched step, which may still be running.

    `tokens`: sampled tokens, int64 `[chunks]` on the device; only those of chunks with one sample are valid.
    """

    tokens: torch.Tensor
    results: Callable[[], tuple[ChunkResult, ...]]
    """Wait for the device; return one result per chunk, in order. A chunk without samples has an empty result."""
    moving_s: float = 0.0  # time in which the host only moved blocks
    masks_s: float = 0.0  # time in which the host waited for masks of structured output


NO_TOKENS = torch.zeros(0, dtype=torch.int64)


def launched_with(results: tuple[ChunkResult, ...], device: torch.device | None = None) -> Launched:
    """Wrap results that are on the host. `device`: copy the tokens to it for the next step; None: no copy is needed."""
    if device is None:
        return Launched(NO_TOKENS, lambda: results)
    first = [each.drawn[0].token_id if isinstance(each, Computed) and each.drawn else 0 for each in results]
    return Launched(torch.tensor(first, device=device), lambda: results)


def launched_moves(device: torch.device) -> Launched:
    """Return a launched step that only moves blocks on the current stream.

    The step is finished when its moves are: afterwards the blocks may be reused, and transfers on other streams may
    read or write them without waiting for this stream.
    """
    done = torch.cuda.Event() if device.type == "cuda" else None
    if done is not None:
        done.record()
    return Launched(torch.zeros(0, dtype=torch.int64, device=device), lambda: _when(done))


def _when(done: torch.cuda.Event | None) -> tuple[ChunkResult, ...]:
    if done is not None:
        done.synchronize()
    return ()


def draws_on_device(chunks: Sequence[Chunk]) -> bool:
    """Return whether the device can draw every sample: from logits, random number, temperature, top-k and top-p."""
    return all(
        chunk.scored is None
        and chunk.pooled is None
        and all(sample.params.drawn_alone and sample.params.filters_by_rank_alone for sample in chunk.samples)
        for chunk in chunks
    )


def launch_draws(
    hidden: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    chunks: Sequence[Chunk],
    chunk_rows: Sequence[slice],
) -> Launched:
    """Launch the sampling of all tokens of chunks that satisfy `draws_on_device`.

    `chunk_rows`: rows of each chunk in `hidden`, `[rows, size]`. `head` computes float32 logits `[rows, vocab]`, which
    the host does not read.
    """
    wanted = _Wanted(chunks, chunk_rows)
    rows, firsts, owners, top_k, numbers, temperature, top_p = to_device(wanted.columns, hidden.device)
    spoilt = torch.zeros(len(chunks), dtype=torch.int32, device=hidden.device)
    spoilt.index_add_(0, owners, (~finite_marks(hidden)).int())
    if not len(rows):
        return Launched(firsts, _Fetched(wanted.counts, rows, temperature, spoilt == 0).results)
    token_ids, logprobs = sample_tokens(head(hidden[rows]), temperature, top_k, top_p, numbers, may_ban=False)
    spoilt.index_add_(0, owners[rows], logprobs.isnan().int())
    return Launched(token_ids[firsts], _Fetched(wanted.counts, token_ids, logprobs, spoilt == 0).results)


def draw_columns(
    samples: Sequence[Sample], positions: Sequence[int]
) -> "tuple[array[int], array[float], array[float], array[float]]":
    """Return columns to copy to a device, one entry per sample: top_k, uniform, temperature and top_p.

    They are as `sample_tokens` expects them. `positions`: absolute position of each sampled token.
    """
    params = [sample.params for sample in samples]
    numbers = [
        0.0 if sample.params.greedy else uniform(sample.params.seed, sample.choice, position)
        for sample, position in zip(samples, positions, strict=True)
    ]
    return (
        array("q", [each.top_k for each in params]),
        array("d", numbers),
        array("f", [each.temperature for each in params]),
        array("f", [each.top_p for each in params]),
    )


class _Wanted:
    """Requested samples of a step's chunks, as columns to copy to a device."""

    def __init__(self, chunks: Sequence[Chunk], chunk_rows: Sequence[slice]) -> None:
        self.counts = [len(chunk.samples) for chunk in chunks]
        rows, firsts = array("q"), array("q")
        samples, positions = list[Sample](), list[int]()
        owners = array("q", bytes(8 * max(place.stop for place in chunk_rows)))  # index of each row's chunk
        for index, (chunk, place) in enumerate(zip(chunks, chunk_rows, strict=True)):
            firsts.append(len(rows) if chunk.samples else 0)
            owners[place] = array("q", [index]) * (place.stop - place.start)
            rows.extend([place.stop - 1] * len(chunk.samples))
            samples += chunk.samples
            positions += [chunk.end] * len(chunk.samples)
        self.columns = (rows, firsts, owners, *draw_columns(samples, positions))


class _Fetched:
    """Results that are being copied to the host, and an event that marks the end of the copies."""

    def __init__(
        self, counts: Sequence[int], tokens: torch.Tensor, logprobs: torch.Tensor, sound: torch.Tensor
    ) -> None:
        """Start the copies.

        `tokens`, `logprobs`: one per sample. `counts`: samples per chunk. `sound`: whether a chunk's values are finite.
        """
        self._counts = counts
        self._parts = [part.to("cpu", non_blocking=True) for part in (tokens, logprobs, sound)]
        self._done = torch.cuda.Event() if tokens.is_cuda else None
        if self._done is not None:
            self._done.record()

    def results(self) -> tuple[ChunkResult, ...]:
        if self._done is not None:
            self._done.synchronize()
        tokens, logprobs, sound = (part.tolist() for part in self._parts)
        draws = (Drawn(*pair) for pair in zip(tokens, logprobs, strict=True))
        of_chunks = [tuple(islice(draws, count)) for count in self._counts]
        spoilt = NonFinite(kv_suspect=True)  # no mask was applied, so only the KV can be at fault
        return tuple(Computed(drawn) if good else spoilt for drawn, good in zip(of_chunks, sound, strict=True))
