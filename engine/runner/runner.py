"""Execution of a plan on one device: block moves, one forward pass over all chunks, sampling. No decisions."""

import logging
import math
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from baton.engine.config.model_config import EncoderConfig
from baton.engine.kv_cache.layout import KvLayout
from baton.engine.kv_cache.sizing import host_pieces
from baton.engine.models.batch import Batch, Model, make_batch, to_device
from baton.engine.models.decoder import DecoderModel
from baton.engine.parallel.other_ranks import OtherRanks
from baton.engine.request import BlockCopy, BlockSwap, Chunk, ChunkResult, Computed, NonFinite, Plan, Pooled, Sample
from baton.engine.runner.cuda_graphs import (
    GraphRecorder,
    GraphSizes,
    RecordedStep,
    RecordedSteps,
    Recorder,
    why_not_recorded,
)
from baton.engine.runner.launched import (
    NO_TOKENS,
    Launched,
    draws_on_device,
    finite_rows,
    launch_draws,
    launched_moves,
    launched_with,
)
from baton.engine.runner.prefill_attention import OURS, PrefillAttention, choose
from baton.engine.sampling.constraint import StepClock
from baton.engine.sampling.params import SamplingParams
from baton.engine.sampling.sampler import Row, RowResult, ask_for_masks, constrained_samples, prompt_scores, sample_each
from baton.kernels.native.library import pytorch_alone
from baton.kernels.pages import copy_blocks
from baton.kernels.types import KvPages

logger = logging.getLogger(__name__)


class WeightSets(Protocol):
    """Interface of several models of one shape over one KV pool, for a reload: engine/reload/runners.py."""

    @property
    def is_one(self) -> bool: ...

    def launch(self, plan: Plan, after: Launched | None) -> Launched: ...

    def follow(self, plan: Plan) -> None: ...

    def without_numbers(self, chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
        """Return the chunks without the number of their weight set, since one model computes them."""


CHUNK_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Prompt sizes in tokens that select all tile sizes of attention and expert kernels (kernels/triton/launch.py)."""

LIKELIEST = Sample(0, SamplingParams(max_tokens=1))
DRAWN = Sample(0, SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9))


def warm_up_plans(block_tokens: int, longest: int, compiles: bool, groups: int = 1) -> Iterator[Plan]:
    """Yield plans that trigger all lazy set-up of a device.

    They compute one prompt and one answer; if the device `compiles` kernels at first use, also every chunk size that
    selects another kernel. All plans use block 0, and their results are discarded. `longest`: maximum context of the
    model in tokens. `groups`: blocks per block table column.
    """
    tokens = min(2, block_tokens)
    yield Plan((Chunk(0, [0] * tokens, 0, [0] * groups),))
    yield Plan((Chunk(0, [0], tokens - 1, [0] * groups, (LIKELIEST,)),))
    if not compiles:
        return
    for tokens in CHUNK_TOKENS:
        for end in {
            tokens,
            longest - longest % block_tokens,
        }:  # attention splits the shortest context into one part, the longest into the maximum
            if tokens <= end <= longest:
                yield Plan((_drawing_chunk(0, tokens, end, block_tokens, groups),))
    for end in {2, longest - longest % block_tokens}:  # two decode rows, first without and then with a prompt chunk
        answers = tuple(_drawing_chunk(number, 1, end - number, block_tokens, groups) for number in range(2))
        yield Plan(answers)
        yield Plan((*answers, _drawing_chunk(2, 2, 2, block_tokens, groups)))
    yield Plan((), copies=(BlockCopy(0, 0),))


def _drawing_chunk(number: int, tokens: int, end: int, block_tokens: int, groups: int) -> Chunk:
    return Chunk(number, [0] * tokens, end - tokens, [0] * (-(-end // block_tokens) * groups), (DRAWN,))


class HostPool:
    """Host memory for the KV of preempted sequences: blocks are copied to slots and back, byte for byte.

    `total_slots`: slots of one block each. `blocks`: the pool, uint8 `[blocks, block_bytes]`, borrowed. The memory is
    allocated at the first swap or by `reserve`, and pinned for a GPU's pool: copies then run on the stream of the
    kernels that use the blocks, in order with them.
    """

    def __init__(self, blocks: torch.Tensor, total_slots: int) -> None:
        if blocks.dtype != torch.uint8 or blocks.dim() != 2:
            raise ValueError(f"pool: must be uint8 [blocks, block_bytes], got {blocks.dtype} {list(blocks.shape)}")
        self.total_slots = total_slots
        self._blocks = blocks
        self._pieces: list[torch.Tensor] = []

    def reserve(self) -> None:
        """Allocate the memory now, not at the first swap: pinning gigabytes takes seconds, in which no step starts."""
        if not self._pieces:
            block_bytes, pinned = self._blocks.shape[1], self._blocks.device.type == "cuda"
            self._pieces = [
                torch.empty((piece, block_bytes), dtype=torch.uint8, pin_memory=pinned)
                for piece in host_pieces(self.total_slots, block_bytes)
            ]

    def carry_out(self, swaps: Sequence[BlockSwap]) -> None:
        for swap in swaps:
            self._slot(swap.host_slot).copy_(self._blocks[swap.block], non_blocking=True)

    def bring_back(self, swaps: Sequence[BlockSwap]) -> None:
        for swap in swaps:
            self._blocks[swap.block].copy_(self._slot(swap.host_slot), non_blocking=True)

    def _slot(self, slot: int) -> torch.Tensor:
        self.reserve()
        for piece in self._pieces:
            if slot < len(piece):
                return piece[slot]
            slot -= len(piece)
        raise IndexError(f"host slot out of range: the host memory has {self.total_slots} slots")


class Runner:
    """Model over a borrowed KV pool `kv`, as `layout.view()` creates it. Only one thread at a time may call it."""

    def __init__(
        self,
        model: Model,
        layout: KvLayout,
        kv: KvPages,
        host: HostPool | None = None,
        other_ranks: OtherRanks | None = None,
        graphs: GraphSizes | None = None,
        prefill_attention: PrefillAttention = PrefillAttention.AUTO,
    ) -> None:
        """Check the pool.

        `host`: memory for swapped blocks. `other_ranks`: owned by this runner; `kv` is then this rank's part of the
        pool. `graphs`: maximum sizes of the decode steps that `warm_up` records, if device and model allow it.
        `prefill_attention`: kernel for prompt chunks on one GPU; ignored with other ranks.
        """
        config = model.config
        wanted = (layout.num_layers, layout.kinds, config.num_kv_heads, layout.block_tokens, config.head_dim)
        dtype = model.dtype if kv.scales is None else layout.dtype
        is_alike = kv.data.shape[1:] == wanted and kv.value_prefix == config.value_prefix
        if not is_alike or kv.data.dtype != dtype or kv.device != model.device:
            raise ValueError(
                f"pool is {list(kv.data.shape)} {kv.data.dtype} on {kv.device}, "
                f"model needs [blocks, {wanted}] {dtype} on {model.device}"
            )
        self._model = model
        self._layout = layout
        self._block_tokens, self._groups = layout.block_tokens, layout.groups.count
        self._kv = kv
        self._host = host
        self.other_ranks = other_ranks
        self._graphs = graphs
        self._recorded: RecordedSteps | None = None
        self._recorded_sizes: GraphSizes | None = None
        self.weights: WeightSets | None = None
        """Weight sets of the same shape, after a reload."""
        self._prefill_attention, self._prefill = prefill_attention, OURS
        # With native kernels for all large operations, PyTorch's threads would only compete with the kernels' threads.
        computes_natively = isinstance(model, DecoderModel) and model.native is not None
        self._threads = pytorch_alone if computes_natively else nullcontext
        # Kernels and events use the current device of the calling thread.
        self._on_device = partial(torch.cuda.device, model.device) if model.device.type == "cuda" else nullcontext
        # Plans for other ranks need token values, which the previous step must sample first: no launching ahead.
        self.may_launch_ahead = model.device.type == "cuda" and other_ranks is None
        self._clock = StepClock(0.0)  # restarted by each step with structured output

    @property
    def launches_ahead(self) -> bool:
        """Return whether a step is launched before the previous one has finished.

        With several weight sets the result is False, since their tokens are in separate tensors.
        """
        return self.may_launch_ahead and (self.weights is None or self.weights.is_one)

    def run(self, plan: Plan) -> tuple[ChunkResult, ...]:
        """Compute a plan; return one result per chunk, in order. A chunk without samples has an empty result.

        The result of a chunk with any non-finite value is NonFinite, even without samples. Other chunks are unaffected.
        """
        return self.launch(plan).results()

    def launch(self, plan: Plan, after: Launched | None = None) -> Launched:
        """Launch a plan. The host does not wait for the device if all tokens are sampled there.

        `after`: the previous step, whose sampled tokens chunks of this plan may follow.
        """
        return self.compute(plan, after) if self.weights is None else self.weights.launch(plan, after)

    def compute(self, plan: Plan, after: Launched | None = None) -> Launched:
        """Launch a plan with this runner's own model."""
        with self._on_device(), torch.inference_mode(), self._threads():
            moving_s = self._begin(plan)
            self._clock.masks_s = 0.0
            launched = self._launch(plan.chunks, after)
            masks_s = self._clock.masks_s
        if self.other_ranks is not None:
            launched = replace(launched, results=partial(self.other_ranks.whole, launched.results))
        return replace(launched, moving_s=moving_s, masks_s=masks_s) if moving_s or masks_s else launched

    def _launch(self, chunks: tuple[Chunk, ...], after: Launched | None) -> Launched:
        if not chunks:
            return launched_moves(self._model.device)
        if self.weights is not None:
            chunks = self.weights.without_numbers(chunks)
        recorded = self._recorded
        if recorded is not None and (step := recorded.find(chunks)) is not None:
            return self._launch_recorded(recorded, step, chunks, after)
        return self._launch_computed(chunks, after)

    def _begin(self, plan: Plan) -> float:
        """Move the plan's blocks on every rank. Returns the seconds it took.

        The first all-reduce of the layers completes only after the moves of all ranks. A plan without chunks has no
        all-reduce: wait for the other ranks' moves here, since the blocks may be reused afterwards.
        """
        if self.other_ranks is not None:
            self.other_ranks.carry_out(plan)
        if not (plan.swaps_out or plan.swaps_in or plan.copies):
            return 0.0
        began_s = time.monotonic()
        self._move(plan)
        if not plan.chunks and self.other_ranks is not None:
            self.other_ranks.wait_moved()
        return time.monotonic() - began_s

    def _launch_computed(self, chunks: tuple[Chunk, ...], after: Launched | None) -> Launched:
        on_layers_start = self._asks_for_masks(chunks)
        try:
            batch = self._batch(chunks, on_layers_start)
        except Exception:  # invalid tokens of one request must not fail the other requests
            faults = {place: fault for place, chunk in enumerate(chunks) if (fault := self._fault(chunk)) is not None}
            if not faults or len(faults) == len(chunks) > 1 or self.other_ranks is not None:
                raise  # no single request is at fault, or other ranks already have the plan
            return self._launch_others(chunks, faults, after)
        if batch.groups[0].prefills is not None:
            batch = self._prefill.planned(batch)
        if after is not None:
            _fill_in(batch, chunks, after)
        hidden = self._model.hidden(batch, self._kv)
        if self._draws_on_device(chunks):
            return launch_draws(hidden, self._model.logits, chunks, batch.chunk_rows)
        return self._waited_for(self._results(hidden, batch.chunk_rows, chunks))

    def _batch(self, chunks: tuple[Chunk, ...], on_layers_start: Callable[[], None] = lambda: None) -> Batch:
        device = self._model.device
        batch = make_batch(chunks, self._block_tokens, device, on_layers_start, self._prefill.takes, self._groups)
        lowest, highest = (of(of(chunk.token_ids) for chunk in chunks) for of in (min, max))
        if lowest < 0 or highest >= self._model.config.vocab_size:  # an index error would destroy a CUDA context
            raise ValueError(
                f"token ids must be from 0 to {self._model.config.vocab_size - 1}, but are from {lowest} to {highest}"
            )
        return batch

    def _fault(self, chunk: Chunk) -> NonFinite | None:
        """Return the failure of a chunk with invalid token ids, or None."""
        try:
            if all(0 <= token_id < self._model.config.vocab_size for token_id in array("q", chunk.token_ids)):
                return None
        except (TypeError, OverflowError):
            pass  # a token id is not an integer, or exceeds 64 bits
        return NonFinite("its tokens cannot be computed: one is not a token id of the model")

    def _launch_others(
        self, chunks: tuple[Chunk, ...], faults: Mapping[int, NonFinite], after: Launched | None
    ) -> Launched:
        """Compute the chunks without a fault; return the results of all chunks. `faults`: failures by chunk index."""
        good = tuple(chunk for place, chunk in enumerate(chunks) if place not in faults)
        results = iter(self._launch_computed(good, after).results() if good else ())
        return self._waited_for(
            tuple(faults[place] if place in faults else next(results) for place in range(len(chunks)))
        )

    def _launch_recorded(
        self, recorded: RecordedSteps, step: RecordedStep, chunks: tuple[Chunk, ...], after: Launched | None
    ) -> Launched:
        on_device, one_each = self._draws_on_device(chunks), all(len(chunk.samples) <= 1 for chunk in chunks)
        hidden = recorded.run(step, chunks, after, draws=on_device and one_each)
        self._asks_for_masks(chunks)()
        if on_device and one_each and recorded.draws:
            return recorded.launched(chunks)
        chunk_rows = [slice(row, row + 1) for row in range(len(chunks))]
        if on_device:
            return launch_draws(hidden, self._model.logits, chunks, chunk_rows)
        return self._waited_for(self._results(hidden, chunk_rows, chunks, recorded.logits(len(chunks))))

    def _draws_on_device(self, chunks: tuple[Chunk, ...]) -> bool:
        return (self.launches_ahead or self._model.device.type != "cpu") and draws_on_device(chunks)

    def _waited_for(self, results: tuple[ChunkResult, ...]) -> Launched:
        if self.launches_ahead:
            return launched_with(results, self._model.device)
        return Launched(NO_TOKENS, lambda: results)

    def _asks_for_masks(self, chunks: tuple[Chunk, ...]) -> Callable[[], None]:
        """Return a function that requests the step's masks, to be called when the layers start."""
        constrained = constrained_samples(chunks)
        if not constrained:
            return _nothing
        self._clock = StepClock(time.monotonic())
        return partial(ask_for_masks, constrained)

    def _results(
        self,
        hidden: torch.Tensor,
        chunk_rows: Sequence[slice],
        chunks: tuple[Chunk, ...],
        logits: torch.Tensor | None = None,
    ) -> tuple[ChunkResult, ...]:
        """Return the results of a step. `logits`: logits of all rows, if already computed."""
        failed = _non_finite_chunks(hidden, chunk_rows)
        drawn = iter(self._draw(hidden, chunk_rows, chunks, logits))
        of_chunks = [next(drawn) if chunk.samples else () for chunk in chunks]
        return tuple(
            NonFinite(kv_suspect=True) if index in failed else self._result(chunk, hidden, rows, of_chunks[index])
            for index, (chunk, rows) in enumerate(zip(chunks, chunk_rows, strict=True))
        )

    def follow(self, plan: Plan) -> None:
        """Execute a plan on a rank that is not the leader: move blocks and compute KV, sample nothing."""
        if self.weights is None:
            self.compute_kv(plan)
        else:
            self.weights.follow(plan)

    def compute_kv(self, plan: Plan) -> None:
        """Execute a plan with this runner's own model, without sampling."""
        chunks = plan.chunks if self.weights is None else self.weights.without_numbers(plan.chunks)
        with self._on_device(), torch.inference_mode():
            self._move(plan)
            recorded = self._recorded
            if recorded is not None and chunks and (step := recorded.find(chunks)) is not None:
                recorded.run(step, chunks)
            elif chunks:
                self._model.hidden(self._batch(chunks), self._kv)

    def settle(self) -> None:
        """Wait until the device has finished all launched block moves."""
        with self._on_device():
            launched_moves(self._model.device).results()

    def close(self) -> None:
        """Stop the other ranks, if any. They also stop with this process."""
        if self.other_ranks is not None:
            self.other_ranks.close()

    def warm_up(self) -> None:
        """Run a few steps so that the first requests do not pay for lazy set-up, and record graphs.

        The steps write to block 0: call this before any sequence owns blocks.
        """
        is_cuda = self._model.device.type == "cuda"
        if isinstance(self._model.config, EncoderConfig):
            self.run(Plan((Chunk(0, [0] * min(2, self._block_tokens), 0, [0]),)))
            return
        longest = self._model.config.max_positions
        for plan in warm_up_plans(self._block_tokens, longest, compiles=is_cuda, groups=self._groups):
            self.run(plan)
        if is_cuda and self._host is not None:
            self._host.reserve()
        has_one_shape = len(set(self._model.config.kv_units)) == 1
        if is_cuda and self.other_ranks is None and self._groups == 1 and has_one_shape:
            with self._on_device(), torch.inference_mode():
                self._prefill = choose(self._prefill_attention, self._model.config, self._kv)
        if self._graphs is None or not is_cuda:
            return
        if reason := why_not_recorded(self._model):
            logger.info("decode steps are not recorded as CUDA graphs: %s", reason)
        else:
            if self.other_ranks is not None:
                self.other_ranks.record(*self._graphs)
            self.record(self._graphs)
        self._graphs = None

    @property
    def replays_steps(self) -> bool:
        """Return whether decode steps without drafts are replayed as CUDA graphs after the warm-up."""
        will_record = self._graphs is not None and self._model.device.type == "cuda"
        return self._recorded is not None or (will_record and why_not_recorded(self._model) is None)

    def record(self, sizes: GraphSizes, recorder: Recorder | None = None) -> None:
        """Record decode steps up to these sizes. All ranks must do so together."""
        self._recorded_sizes = sizes
        with self._on_device():
            self._recorded = RecordedSteps(self._model, self._kv, recorder or GraphRecorder(), sizes, self._groups)

    @property
    def model(self) -> Model:
        return self._model

    def beside(self, model: Model) -> "Runner":
        """Return a runner of another model of the same shape over the same pool, without recorded steps."""
        other = Runner(model, self._layout, self._kv, self._host, self.other_ranks)
        other._prefill, other.weights = self._prefill, self.weights
        return other

    def take(self, model: Model) -> None:
        """Replace the model by an unused one, and record CUDA graphs again. Recording changes no block.

        All ranks must do so together.
        """
        self._model, self._recorded = model, None
        if self._recorded_sizes is not None:
            with torch.inference_mode():
                self.record(self._recorded_sizes)

    def _move(self, plan: Plan) -> None:
        if plan.swaps_out or plan.swaps_in:
            if self._host is None:
                raise ValueError("the plan swaps blocks, but swap memory is not configured")
            self._host.carry_out(plan.swaps_out)
            self._host.bring_back(plan.swaps_in)
        if plan.copies:
            pairs = [(copy.source, copy.destination) for copy in plan.copies]
            columns = [array("q", column) for column in zip(*pairs, strict=True)]
            sources, destinations = to_device(columns, self._kv.device)  # torch.tensor would wait for running kernels
            copy_blocks(self._kv, sources, destinations)

    def _draw(
        self,
        hidden: torch.Tensor,
        chunk_rows: Sequence[slice],
        chunks: tuple[Chunk, ...],
        logits: torch.Tensor | None,
    ) -> list[RowResult]:
        """Sample the chunks that have samples; return their results in order.

        Logits are computed only for the last row of each of these chunks.
        """
        rows = [Row(chunk.samples, chunk.end) for chunk in chunks if chunk.samples]
        if not rows:
            return []
        last = [place.stop - 1 for chunk, place in zip(chunks, chunk_rows, strict=True) if chunk.samples]
        whole = hidden if logits is None else logits
        chosen = whole if last == list(range(len(whole))) else whole[last]
        return sample_each(self._model.logits(chosen) if logits is None else chosen, rows, self._clock)

    def _result(self, chunk: Chunk, hidden: torch.Tensor, rows: slice, drawn: RowResult) -> ChunkResult:
        """Return the result of one chunk. `rows`: the chunk's rows of `hidden`."""
        if isinstance(drawn, NonFinite):
            return drawn
        prompt = () if chunk.scored is None else prompt_scores(self._model.logits, hidden[rows], chunk.scored)
        if prompt is None:
            return NonFinite()
        if chunk.pooled is not None:
            return self._pool(hidden[rows], chunk.pooled)
        # Report prompt scores even if the mask is late: the later chunk that samples consists of the newest token only,
        # so it cannot score the prompt.
        return Computed(late=True, prompt=prompt) if drawn is None else Computed(drawn, prompt)

    def _pool(self, hidden: torch.Tensor, pooled: Pooled) -> ChunkResult:
        """Return the pooled vector of a chunk's `hidden`, summed in float64 so that a mean over chunks rounds once."""
        chosen = hidden[pooled.rows.start : pooled.rows.stop]
        if pooled.head_token_ids:
            logits = self._model.logits(chosen)
            if max(pooled.head_token_ids) >= logits.shape[-1]:  # a classification head has fewer outputs than tokens
                return NonFinite(f"pooling.head_token_ids: the head has {logits.shape[-1]} outputs")
            made = logits[:, list(pooled.head_token_ids)]
        else:
            made = self._model.normal(chosen)
        return Computed(pooled=tuple(made.double().sum(0).tolist()))


def _nothing() -> None:
    pass


def _fill_in(batch: Batch, chunks: tuple[Chunk, ...], after: Launched) -> None:
    """Copy sampled tokens of the previous step into `batch`, as input of the chunks that continue their sequences."""
    places = [chunk.follows for chunk in chunks if chunk.follows is not None]
    if not places:
        return
    rows = [rows.start for chunk, rows in zip(chunks, batch.chunk_rows, strict=True) if chunk.follows is not None]
    sources, targets = to_device((array("q", places), array("q", rows)), batch.token_ids.device)
    batch.token_ids[targets] = after.tokens[sources]


def _non_finite_chunks(hidden: torch.Tensor, chunk_rows: Sequence[slice]) -> set[int]:
    """Return the indexes of chunks with a non-finite row in `hidden`, the output of the last layer.

    Non-finite KV always causes such a row.
    """
    if math.isfinite(hidden.sum()):
        return set()
    finite = finite_rows(hidden)
    return {index for index, rows in enumerate(chunk_rows) if not all(finite[rows])}
