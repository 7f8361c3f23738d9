"""Decode steps as recorded CUDA graphs: one launch per step, from its inputs to its tokens.

Graphs are recorded for some batch sizes. A step uses the smallest graph that fits; padding rows have no context or KV
slot (kernels/attention.py, kernels/pages.py). One copy moves a step's inputs to the memory that the recorded kernels
read, another moves its tokens to the host. All graphs share input and working memory, since one is replayed at a time.

A row's input token may be the one that the previous step sampled: it is then read on the device.
"""

import logging
import math
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple, Protocol

import torch

from baton.engine.kv_cache.sizing import MAX_RECORDED_ROWS
from baton.engine.models.batch import ALIGNED_BYTES, Batch, BatchNumbers, Model, packed, parts_of
from baton.engine.models.decoder import DecoderModel
from baton.engine.models.feed_forward import ExpertStack, FeedForward, Gated, Ungated
from baton.engine.parallel.model import ParallelModel, SummedLinear
from baton.engine.request import Chunk, ChunkResult, Computed, NonFinite, Sample, computed_token
from baton.engine.runner.launched import Launched, draw_columns
from baton.engine.sampling.params import SamplingParams
from baton.kernels.sampling import sample_tokens
from baton.kernels.types import DecodeRows, GroupRows, KvPages, Sampled

logger = logging.getLogger(__name__)
NO_SLOT = -1
DECODE_PRIORITY = -1  # CUDA stream priority: decode steps precede prompt chunks that wait for the same GPU
SIZES = (1, 2, 4, *range(8, MAX_RECORDED_ROWS + 1, 8))  # recorded sizes in rows; larger steps run without a graph
UNDRAWN = Sample(0, SamplingParams(max_tokens=1))
"""Greedy sample, the fastest, for rows whose token is unused or is sampled on the host."""


class Recorder(Protocol):
    """Interface that records a computation to replay it; on a GPU, GraphRecorder implements it."""

    def record(self, compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Record `compute`. Return a function that repeats it on the same memory, and the tensor with its result."""


class GraphRecorder:
    """Recorder of CUDA graphs, which share working memory because one is replayed at a time.

    Kernels keep the priority of the stream on which they are recorded, which is the decode steps' priority in every
    worker role, since the role may change. One stream records all graphs, since PyTorch keeps a memory pool and a
    cuBLAS workspace for each stream.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(priority=DECODE_PRIORITY)

    def record(self, compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        side = self._side
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # the first call, before recording, compiles kernels and sets up libraries
            compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU during this: their work is not recorded.
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            result = compute()
        return graph.replay, result


class GraphSizes(NamedTuple):
    rows: int  # maximum number of sequences in a step
    columns: int  # maximum number of columns in one block table


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """CUDA graph for steps with at most `rows` rows and at most `columns` block table columns in total."""

    rows: int
    columns: int
    replay: Callable[[], None]
    hidden: torch.Tensor  # [rows, hidden size], written by `replay`


class RecordedSteps:
    """Recorded decode steps of a model over `kv`, a borrowed KV pool.

    With several ranks only the layers are recorded: ranks compute logits together when the leader asks.
    """

    def __init__(self, model: Model, kv: KvPages, recorder: Recorder, most: GraphSizes, groups: int = 1) -> None:
        """Record a step of each size up to `most`. `groups`: number of layer groups.

        The pool is not changed, since all rows are padding.
        """
        self._model, self._kv = model, kv
        self._decoder = model if isinstance(model, DecoderModel) else None
        self._logits: torch.Tensor | None = None  # logits of the last step, [rows, vocab] in the model's dtype
        self.sizes = sorted({min(most.rows, SIZES[-1]), *(size for size in SIZES if size < most.rows)})
        started, largest = time.monotonic(), self.sizes[-1]
        with torch.inference_mode():
            self._memory = _StepMemory(largest, largest * most.columns, groups, model.device)
            # One counter per row and query head: several groups of query heads may share one KV head.
            self._arrivals = torch.zeros(largest * model.config.num_heads, dtype=torch.int32, device=kv.data.device)
            if self._decoder is not None:
                vocab = model.config.vocab_size
                self._logits = torch.empty(largest, vocab, dtype=model.dtype, device=model.device)
            # The largest graph is recorded first, so that smaller ones reuse its memory.
            self._steps = {size: self._record(recorder, size, most) for size in reversed(self.sizes)}
        reserved = torch.cuda.memory_reserved(model.device) if model.device.type == "cuda" else 0
        logger.info(
            "recorded %d graphs for 1 to %d sequences in %.1f s; %.0f MiB of GPU memory reserved in total",
            len(self.sizes),
            largest,
            time.monotonic() - started,
            reserved / 2**20,
        )

    def find(self, chunks: Sequence[Chunk]) -> RecordedStep | None:
        """Return the graph for a step, or None if the step must run without one.

        No graph fits a step with prompt chunks, drafts, adapters, too many rows or too many blocks, nor a step with a
        row that continues a row of the previous step whose index exceeds the largest graph.
        """
        place, most = bisect_left(self.sizes, len(chunks)), self.sizes[-1]
        computed = any(len(chunk.token_ids) > 1 or chunk.adapter or chunk.is_draft for chunk in chunks)
        if place == len(self.sizes) or computed:
            return None
        if any(chunk.follows is not None and chunk.follows >= most for chunk in chunks):
            return None
        step = self._steps[self.sizes[place]]
        tokens = self._kv.block_tokens
        return step if sum(-(-chunk.end // tokens) for chunk in chunks) <= step.columns else None

    def run(
        self, step: RecordedStep, chunks: Sequence[Chunk], after: Launched | None = None, draws: bool = False
    ) -> torch.Tensor:
        """Compute the residual stream of the chunks, `[chunks, hidden size]`, valid until the next step.

        `after`: the previous step, whose tokens some chunks may follow. `draws`: whether `launched` will
        return the graph's tokens.
        """
        follows = after is not None and any(chunk.follows is not None for chunk in chunks)
        if follows and after is not None:
            self._memory.keep(after.tokens)
        self._memory.bring(chunks, step.rows, self._kv.block_tokens, draws)
        step.replay()
        return step.hidden[: len(chunks)]

    @property
    def draws(self) -> bool:
        """Return whether steps sample tokens; otherwise they end with the last layer."""
        return self._logits is not None

    def logits(self, rows: int) -> torch.Tensor | None:
        """Return the last step's logits, float32 `[rows, vocab]`, or None if steps end with the last layer."""
        return None if self._logits is None else self._logits[:rows].float()

    def launched(self, chunks: Sequence[Chunk]) -> Launched:
        """Return the tokens of the last step, at most one per chunk; their copies to the host are in flight."""
        return self._memory.drawn([bool(chunk.samples) for chunk in chunks])

    def _record(self, recorder: Recorder, rows: int, most: GraphSizes) -> RecordedStep:
        memory, columns = self._memory, rows * most.columns
        views = memory.views(rows, columns)
        # All contexts share the pool: with more rows, each context is shorter.
        usual_tokens = min(most.columns, max(1, self._kv.blocks // len(views.groups) // rows)) * self._kv.block_tokens
        own = (views.context_tokens, usual_tokens, self._arrivals)
        groups = tuple(
            GroupRows(slots, DecodeRows(views.block_ids, starts, *own), None) for slots, starts in views.groups
        )

        def compute() -> torch.Tensor:
            token_ids = views.tokens[views.sources]
            batch = Batch(token_ids, views.positions, groups, (slice(0, rows),))
            hidden = self._model.hidden(batch, self._kv)
            if self._decoder is not None and self._logits is not None:
                logits = self._decoder.logits(hidden, self._logits[:rows])
                sample_tokens(logits, *views.draws, may_ban=False, out=memory.sampled(rows))
            return hidden

        memory.bring((), rows, self._kv.block_tokens, draws=False)
        replay, hidden = recorder.record(compute)
        logger.debug("recorded the graph of %d sequences", rows)
        return RecordedStep(rows, columns, replay, hidden)


class _StepViews(NamedTuple):
    """Inputs of a step of one size, in the device memory that its graph reads; int64, except for `draws`."""

    tokens: torch.Tensor  # tokens that the previous step sampled, then the input tokens of this step's rows
    sources: torch.Tensor  # [rows], indexes into `tokens`
    positions: torch.Tensor  # [rows]
    context_tokens: torch.Tensor  # [rows]
    groups: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # per group: slots [rows], block starts [rows + 1]
    block_ids: torch.Tensor
    draws: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # temperature, top_k, top_p, uniform


class _StepMemory:
    """Device memory that all recorded steps share: sampled log-probabilities, sampled tokens, and the inputs of a step.

    The padded number of rows determines all offsets; block tables come last.
    """

    def __init__(self, rows: int, columns: int, groups: int, device: torch.device) -> None:
        """Allocate the memory. `rows`, `columns`: size of the largest step."""
        self._device, self._groups = device, groups
        numbers = packed(_room(rows, columns, groups), torch.device("cpu"))
        self._logprob_bytes = -(-4 * rows // ALIGNED_BYTES) * ALIGNED_BYTES
        self._drawn = -(-8 * rows // ALIGNED_BYTES) * ALIGNED_BYTES // 8  # capacity for sampled tokens
        self._begin = self._logprob_bytes + 8 * self._drawn  # byte offset of the inputs
        self._whole = torch.zeros(self._begin + len(numbers), dtype=torch.uint8, device=device)
        self._latest: torch.Tensor | None = None  # tokens of the last replayed step

    def views(self, rows: int, columns: int) -> _StepViews:
        parts = parts_of(self._whole[self._begin :], _room(rows, columns, self._groups))
        _, sources, positions, contexts, top_k, uniform, temperature, top_p, *of_groups, block_ids = parts
        groups = tuple(zip(of_groups[::2], of_groups[1::2], strict=True))
        tokens = self._whole[self._logprob_bytes : self._begin + 8 * rows].view(torch.int64)
        draws = (temperature, top_k, top_p, uniform)
        return _StepViews(tokens, sources, positions, contexts, groups, block_ids, draws)

    def sampled(self, rows: int) -> Sampled:
        logprobs = self._whole[: 4 * rows].view(torch.float32)
        return Sampled(self._whole[self._logprob_bytes :][: 8 * rows].view(torch.int64), logprobs)

    def bring(self, chunks: Sequence[Chunk], rows: int, block_tokens: int, draws: bool) -> None:
        numbers = packed(_columns(chunks, rows, self._drawn, block_tokens, draws, self._groups), self._device)
        self._whole[self._begin : self._begin + len(numbers)].copy_(numbers, non_blocking=True)

    def keep(self, tokens: torch.Tensor) -> None:
        """Copy the previous step's `tokens` to this memory, if they are not already there from a replayed step."""
        if tokens is not self._latest:
            kept = tokens[: self._drawn]  # `find` rejects steps that continue later rows
            self.sampled(len(kept)).token_ids.copy_(kept)

    def drawn(self, wanted: Sequence[bool]) -> Launched:
        """Return the results of the replayed step. `wanted`: whether each row's token is used."""
        chunks = len(wanted)
        self._latest = self.sampled(chunks).token_ids
        on_host = self._whole[: self._logprob_bytes + 8 * chunks].to("cpu", non_blocking=True, copy=True)
        done = torch.cuda.Event() if self._whole.is_cuda else None
        if done is not None:
            done.record()

        def results() -> tuple[ChunkResult, ...]:
            if done is not None:
                done.synchronize()
            logprobs = on_host[: 4 * chunks].view(torch.float32).tolist()
            token_ids = on_host[self._logprob_bytes :].view(torch.int64).tolist()
            return tuple(map(_result, token_ids, logprobs, wanted))

        return Launched(self._latest, results)


def _result(token_id: int, logprob: float, wanted: bool) -> ChunkResult:
    """Return one row's result. A non-finite hidden row yields the log-probability NaN."""
    if math.isnan(logprob):
        return NonFinite(kv_suspect=True)
    return computed_token(token_id, logprob) if wanted else Computed()


def _columns(
    chunks: Sequence[Chunk], rows: int, drawn: int, block_tokens: int, draws_on_device: bool, groups: int
) -> list[array]:  # type: ignore[type-arg]
    """Return the inputs of a step, padded to `rows`. `drawn`: number of sampled tokens stored before the rows' own."""
    numbers, sources = BatchNumbers(groups), array("q", range(drawn, drawn + rows))
    numbers.add_single(chunks, block_tokens)
    for place, chunk in enumerate(chunks):
        if chunk.follows is not None:
            sources[place] = chunk.follows
    padding = rows - len(chunks)
    for column in (numbers.token_ids, numbers.positions, numbers.ends):
        column.extend(repeat(0, padding))
    samples = [chunk.samples[0] if draws_on_device and chunk.samples else UNDRAWN for chunk in chunks]
    samples += repeat(UNDRAWN, padding)
    for slots in numbers.slots:
        slots.extend(repeat(NO_SLOT, padding))
    starts = [numbers.starts_of(group) for group in range(groups)]
    starts = [each + array("q", repeat(each[-1], padding)) for each in starts]
    made: list[array] = [numbers.token_ids, sources, numbers.positions, numbers.ends]  # type: ignore[type-arg]
    made += draw_columns(samples, numbers.ends)
    for slots, own_starts in zip(numbers.slots, starts, strict=True):
        made += slots, own_starts
    return [*made, numbers.block_ids]


def _room(rows: int, columns: int, groups: int) -> list[array]:  # type: ignore[type-arg]
    """Return placeholder input columns with the lengths of the largest step's columns."""
    return [*_columns((), rows, 0, 1, False, groups)[:-1], array("q", bytes(8 * columns * groups))]


def why_not_recorded(model: Model) -> str | None:
    """Return the reason why decode steps cannot be recorded, such as a wait for the host; None if they can."""
    if not model.config.makes_answers:
        return f"{model.config.family} computes vectors, not answers"
    if isinstance(model, ParallelModel):
        if not model.collectives.can_be_recorded:
            return f"sums over {model.collectives.backend} cannot be part of a graph"
        model = model.part
    if not isinstance(model, DecoderModel):
        return f"{model.config.family} runs in transformers' own code"
    if model.gemma is not None:
        return f"steps of {model.config.family} have not been recorded on a GPU yet"
    if model.config.recurrent is not None:
        return "the locations of its states are computed on the host"
    if not all(_is_recordable(layer.feed_forward) for layer in model.layers):
        return "its experts are chosen on the host"
    return None


def _is_recordable(feed_forward: FeedForward | None) -> bool:
    part = feed_forward.part if isinstance(feed_forward, SummedLinear) else feed_forward
    return part is None or isinstance(part, Gated | Ungated | ExpertStack)
