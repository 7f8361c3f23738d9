"""Result of a step that the device may still compute: tokens for the next step now, for the host when finished."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from baton.engine.models.batch import to_device
from baton.engine.request import Chunk, ChunkResult, Computed, Drawn, NonFinite, Sample, uniform
from baton.kernels.sampling import sample_tokens


def finite_rows(rows: torch.Tensor) -> list[bool]:
    """Return which rows of `[rows, size]` are finite, on the host."""
    found: list[bool] = finite_marks(rows).tolist()
    return found


def finite_marks(rows: torch.Tensor) -> torch.Tensor:
    """Return which rows are finite, bool `[rows]`. `x - x` is 0 or NaN: several times faster than isfinite."""
    return (rows - rows).sum(-1) == 0


@dataclass(frozen=True, slots=True)
class Launched:
    """Launched step. `tokens`: int64 `[chunks]` on the device, valid for chunks with one sample."""

    tokens: torch.Tensor
    results: Callable[[], tuple[ChunkResult, ...]]
    """Wait for the device; return one result per chunk, in order, empty if it samples nothing."""
    moving_s: float = 0.0  # time in which the host only moved blocks
    masks_s: float = 0.0  # time in which the host waited for masks of structured output


NO_TOKENS = torch.zeros(0, dtype=torch.int64)


def launched_with(results: tuple[ChunkResult, ...], device: torch.device | None = None) -> Launched:
    """Wrap results that are on the host. `device`: where the next step may read the tokens, if it may."""
    if device is None:
        return Launched(NO_TOKENS, lambda: results)
    first = [each.drawn[0].token_id if isinstance(each, Computed) and each.drawn else 0 for each in results]
    return Launched(torch.tensor(first, device=device), lambda: results)


def launched_moves(device: torch.device) -> Launched:
    """Return a launched step that only moves blocks on the current stream.

    It finishes with its moves: its blocks are then reused, and a pull on another stream waits for no event of this one.
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
    """Return whether every token needs only its logits, random number, temperature, top-k and top-p."""
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
    """Sample all tokens of chunks that satisfy draws_on_device; `chunk_rows`: their rows of `hidden`, `[rows, size]`.

    `head` computes float32 logits `[rows, vocab]`. The host reads neither.
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


class DrawNumbers:
    """Parameters of each sample as columns for a device."""

    def __init__(self) -> None:
        self._top_k, self._numbers = array("q"), array("d")
        self._temperature, self._top_p = array("f"), array("f")

    def add(self, sample: Sample, position: int) -> None:
        """Add a sample. `position`: of the sampled token."""
        params = sample.params
        self._top_k.append(params.top_k)
        self._numbers.append(0.0 if params.greedy else uniform(params.seed, sample.choice, position))
        self._temperature.append(params.temperature)
        self._top_p.append(params.top_p)

    @property
    def columns(self) -> "tuple[array[int], array[float], array[float], array[float]]":
        """Columns top_k, uniform, temperature and top_p, as `sample_tokens` expects them."""
        return self._top_k, self._numbers, self._temperature, self._top_p


class _Wanted:
    """Samples of a step, as numbers for a device."""

    def __init__(self, chunks: Sequence[Chunk], chunk_rows: Sequence[slice]) -> None:
        self.counts = [len(chunk.samples) for chunk in chunks]
        rows, firsts, draws = array("q"), array("q"), DrawNumbers()
        owners = array("q", bytes(8 * max(place.stop for place in chunk_rows)))  # chunk of each row
        for index, (chunk, place) in enumerate(zip(chunks, chunk_rows, strict=True)):
            firsts.append(len(rows) if chunk.samples else 0)
            owners[place] = array("q", [index]) * (place.stop - place.start)
            for sample in chunk.samples:
                rows.append(place.stop - 1)
                draws.add(sample, chunk.end)
        self.columns = (rows, firsts, owners, *draws.columns)


class _Fetched:
    """Copies to the host in flight, and the event after them."""

    def __init__(
        self, counts: Sequence[int], tokens: torch.Tensor, logprobs: torch.Tensor, sound: torch.Tensor
    ) -> None:
        """Start the copies. tokens, logprobs: one per sample; counts, sound: samples and finiteness per chunk."""
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
        spoilt = NonFinite(kv_suspect=True)  # samples on a device have no masks
        return tuple(Computed(drawn) if good else spoilt for drawn, good in zip(of_chunks, sound, strict=True))
