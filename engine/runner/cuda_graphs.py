"""Decode steps as recorded graphs: the launches of a whole forward pass become one.

A graph is recorded for some sizes of batch; a step takes the next larger one, and rows that pad it have no context and
no slot (kernels/attention.py, kernels/pages.py). Numbers of a step are copied to where the recorded kernels read
them: all graphs share that memory, and the memory that they work in, since one is replayed at a time.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from baton.engine.models.batch import Batch, Model
from baton.engine.models.decoder import DecoderModel
from baton.engine.models.feed_forward import ExpertStack, FeedForward, Gated
from baton.engine.parallel.model import ParallelModel, SummedLinear
from baton.kernels.types import DecodeRows, KvPages

logger = logging.getLogger(__name__)
NO_SLOT = -1
SIZES = (1, 2, 4, *range(8, 257, 8))  # rows; steps of more are computed as they are


class Recorder(Protocol):
    """Where graphs are made; on a GPU that is GraphRecorder."""

    def record(self, compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """A function that repeats `compute` on the same memory, and the place of its result."""


class GraphRecorder:
    """CUDA graphs that share their working memory: they are replayed one at a time.

    All are recorded on one stream: PyTorch keeps the memory of a pool, and a workspace of cuBLAS, for each stream.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(priority=torch.cuda.current_stream().priority)

    def record(self, compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        side = self._side
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # kernels are compiled and libraries set up before anything is recorded
            compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile: their work is not recorded and does no harm.
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            result = compute()
        return graph.replay, result


class GraphSizes(NamedTuple):
    rows: int  # sequences of a step, at most
    blocks: int  # of one sequence, at most


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """For batches of at most so many rows as its numbers have."""

    numbers: Batch
    decode: DecodeRows  # of `numbers`
    replay: Callable[[], None]
    hidden: torch.Tensor  # [rows, hidden size], written by `replay`

    def run(self, batch: Batch, decode: DecodeRows) -> torch.Tensor:
        """Rows of `batch`, valid until the next replay of any graph."""
        rows, own, numbers = len(batch.token_ids), self.decode, self.numbers
        targets = [
            numbers.token_ids[:rows],
            numbers.positions[:rows],
            numbers.slots[:rows],
            own.context_tokens[:rows],
            own.block_starts[: rows + 1],
            own.block_ids[: len(decode.block_ids)],
        ]
        sources = [batch.token_ids, batch.positions, batch.slots]
        sources += [decode.context_tokens, decode.block_starts, decode.block_ids]
        torch._foreach_copy_(targets, sources)  # one launch
        if rows < len(numbers.token_ids):
            numbers.slots[rows:].fill_(NO_SLOT)
            own.context_tokens[rows:].zero_()
            own.block_starts[rows + 1 :] = own.block_starts[rows]
        self.replay()
        return self.hidden[:rows]


class GraphedModel:
    """A model whose decode steps are replayed; all other steps are computed as usual. Over one pool."""

    def __init__(self, model: Model, kv: KvPages, recorder: Recorder, most: GraphSizes) -> None:
        """Records at once. Block 0 of the pool is not touched: there are only rows of padding."""
        self._model = model
        self.config, self.dtype, self.device = model.config, model.dtype, model.device
        self._kv = kv
        self.recorded_sizes = sorted({min(most.rows, SIZES[-1]), *(size for size in SIZES if size < most.rows)})
        started = time.monotonic()
        with torch.inference_mode():
            self._shared = _padding(self.recorded_sizes[-1], most.blocks, model.device)
            # The largest first: the smaller ones find their memory made.
            self._steps = {size: self._record(recorder, size, most) for size in reversed(self.recorded_sizes)}
        reserved = torch.cuda.memory_reserved(model.device) if model.device.type == "cuda" else 0
        logger.info(
            "recorded %d graphs, of steps of 1 to %d sequences, in %.1f s; %.0f MiB are reserved in all",
            len(self.recorded_sizes),
            self.recorded_sizes[-1],
            time.monotonic() - started,
            reserved / 2**20,
        )

    def hidden(self, batch: Batch, kv: KvPages) -> torch.Tensor:
        step = self._step_for(batch) if kv is self._kv else None
        if step is None or batch.decode is None:
            return self._model.hidden(batch, kv)
        batch.meanwhile()
        return step.run(batch, batch.decode)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)

    def _step_for(self, batch: Batch) -> RecordedStep | None:
        """None for a step that no graph computes: with chunks of prompts, adapters, or more rows or blocks."""
        if batch.decode is None or batch.prefills or batch.adapters is not None:
            return None
        place = bisect_left(self.recorded_sizes, len(batch.token_ids))
        if place == len(self.recorded_sizes):
            return None
        step = self._steps[self.recorded_sizes[place]]
        return step if len(batch.decode.block_ids) <= len(step.decode.block_ids) else None

    def _record(self, recorder: Recorder, rows: int, most: GraphSizes) -> RecordedStep:
        token_ids, positions, slots, context_tokens, block_starts, block_ids = self._shared
        # Contexts share the pool, so that many are shorter than one may be.
        usual_blocks = min(most.blocks, max(1, self._kv.blocks // rows))
        decode = DecodeRows(
            block_ids[: rows * most.blocks],
            block_starts[: rows + 1],
            context_tokens[:rows],
            usual_blocks * self._kv.block_tokens,
        )
        numbers = Batch(token_ids[:rows], positions[:rows], slots[:rows], decode, (), (slice(0, rows),))
        replay, hidden = recorder.record(lambda: self._model.hidden(numbers, self._kv))
        logger.debug("recorded the step of %d sequences", rows)
        return RecordedStep(numbers, decode, replay, hidden)


def why_not_recorded(model: Model) -> str | None:
    """The part of a decode step that waits for the host, or is unknown to us; None where there is none."""
    if isinstance(model, ParallelModel):
        if not model.collectives.can_be_recorded:
            return f"sums over {model.collectives.backend} are no part of a graph"
        model = model.part
    if not isinstance(model, DecoderModel):
        return f"{model.config.family} runs in transformers' own code"
    if not all(_is_recordable(layer.feed_forward) for layer in model.layers):
        return "its experts are chosen on the host"
    return None


def _is_recordable(feed_forward: FeedForward) -> bool:
    part = feed_forward.part if isinstance(feed_forward, SummedLinear) else feed_forward
    return isinstance(part, Gated | ExpertStack)


def _padding(rows: int, blocks: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Token ids, positions, slots, contexts, starts of tables, tables: of a batch that is nothing but padding."""
    numbers = [torch.zeros(size, dtype=torch.int64, device=device) for size in [rows] * 4 + [rows + 1, rows * blocks]]
    numbers[2].fill_(NO_SLOT)
    return tuple(numbers)
