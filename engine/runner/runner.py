"""Carries out a Plan on one device: copies, one forward pass over all chunks, sampling. Decides nothing."""

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
    """Models of one shape over one pool: engine/reload/runners.py."""

    @property
    def is_one(self) -> bool: ...

    def launch(self, plan: Plan, after: Launched | None) -> Launched: ...

    def follow(self, plan: Plan) -> None: ...

    def without_numbers(self, chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
        """As one model of them computes the chunks: with no number of its weights."""


CHUNK_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Of prompts that take each tile there is, of attention and of an expert's few tokens (kernels/triton/launch.py)."""

LIKELIEST = Sample(0, SamplingParams(max_tokens=1))
DRAWN = Sample(0, SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9))


def warm_up_plans(block_tokens: int, longest: int, compiles: bool, groups: int = 1) -> Iterator[Plan]:
    """Plans that make a device set up all that its first requests would otherwise wait for.

    They are one prompt and one answer; where the device `compiles` kernels at first use, of every size that it
    distinguishes. All of them use block 0 alone, over and over: the results are not used. `longest`: positions of the
    model, in tokens. `groups`: blocks of a column.
    """
    tokens = min(2, block_tokens)
    yield Plan((Chunk(0, [0] * tokens, 0, [0] * groups),))
    yield Plan((Chunk(0, [0], tokens - 1, [0] * groups, (LIKELIEST,)),))
    if not compiles:
        return
    for tokens in CHUNK_TOKENS:
        for end in {tokens, longest - longest % block_tokens}:  # a context of one part, and one that is cut in most
            if tokens <= end <= longest:
                yield Plan((_drawing_chunk(0, tokens, end, block_tokens, groups),))
    for end in {2, longest - longest % block_tokens}:  # answers alone, of few rows, and beside a prompt
        answers = tuple(_drawing_chunk(number, 1, end - number, block_tokens, groups) for number in range(2))
        yield Plan(answers)
        yield Plan((*answers, _drawing_chunk(2, 2, 2, block_tokens, groups)))
    yield Plan((), copies=(BlockCopy(0, 0),))


def _drawing_chunk(number: int, tokens: int, end: int, block_tokens: int, groups: int) -> Chunk:
    return Chunk(number, [0] * tokens, end - tokens, [0] * (-(-end // block_tokens) * groups), (DRAWN,))


class HostPool:
    """Host memory for the KV of preempted sequences: blocks are carried out to slots and brought back, byte for byte.

    `total_slots` slots of one block each, for the pool that `blocks` is: uint8 `[blocks, block_bytes]`, borrowed.

    The memory is taken with the first swap, or by `reserve`, and pinned where the pool is a GPU's: copies then run on
    its stream, in order with the kernels that compute on the blocks.
    """

    def __init__(self, blocks: torch.Tensor, total_slots: int) -> None:
        if blocks.dtype != torch.uint8 or blocks.dim() != 2:
            raise ValueError(f"the pool must be uint8 [blocks, block_bytes], got {blocks.dtype} {list(blocks.shape)}")
        self.total_slots = total_slots
        self._blocks = blocks
        self._pieces: list[torch.Tensor] = []

    def reserve(self) -> None:
        """Takes the memory now: to pin gigabytes takes seconds, in which no step of a GPU begins."""
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
        raise IndexError(f"there are {self.total_slots} slots")


class Runner:
    """Owns the model; borrows `kv`, the pool as `layout.view()` makes it. One thread at a time."""

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
        """`host`: where plans that swap blocks put them. `other_ranks`: the other ranks, owned; `kv` is this rank's.

        `graphs`: decode steps that `warm_up` records, where device and model allow it. `prefill_attention`: what it
        chooses on a GPU, for a model on one rank.
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
        """Since the model was loaded again with other weights."""
        self._prefill_attention, self._prefill = prefill_attention, OURS
        # Where native kernels compute all that is large, threads of PyTorch's would only take cores from theirs.
        computes_natively = isinstance(model, DecoderModel) and model.native is not None
        self._threads = pytorch_alone if computes_natively else nullcontext
        # Kernels and events go to the current device of the thread, whichever thread it is.
        self._on_device = partial(torch.cuda.device, model.device) if model.device.type == "cuda" else nullcontext
        # Not with several ranks: a plan contains the very tokens, and those of the step before are not known then.
        self.may_launch_ahead = model.device.type == "cuda" and other_ranks is None
        self._clock = StepClock(0.0)  # of the step under way; begins anew where some answer is structured output

    @property
    def launches_ahead(self) -> bool:
        """Not with several sets of weights, whose tokens lie apart."""
        return self.may_launch_ahead and (self.weights is None or self.weights.is_one)

    def run(self, plan: Plan) -> tuple[ChunkResult, ...]:
        """One result per chunk, in their order; empty for a chunk that draws nothing.

        A chunk with anything not finite in it is NonFinite, whether or not it draws; the others do not notice.
        """
        return self.launch(plan).results()

    def launch(self, plan: Plan, after: Launched | None = None) -> Launched:
        """As `run`; where tokens are drawn on the device the host does not wait for it.

        `after`: the step before, whose draws chunks of this plan may follow.
        """
        return self.compute(plan, after) if self.weights is None else self.weights.launch(plan, after)

    def compute(self, plan: Plan, after: Launched | None = None) -> Launched:
        """As `launch`, by this runner's own model alone."""
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
        """Moves blocks. Returns the seconds that it took.

        On every rank: else each has moved its own by the time of the first sum, and no block is free before that.
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
        meanwhile = self._asks_for_masks(chunks)
        try:
            batch = self._batch(chunks, meanwhile)
        except Exception:  # what one request's tokens lead to is its own fault, not its neighbours'
            faults = {place: fault for place, chunk in enumerate(chunks) if (fault := self._fault(chunk)) is not None}
            if not faults or len(faults) == len(chunks) > 1 or self.other_ranks is not None:
                raise  # it is no single request's, or other ranks have the plan
            return self._launch_others(chunks, faults, after)
        if batch.groups[0].prefills is not None:
            batch = self._prefill.planned(batch)
        if after is not None:
            _fill_in(batch, chunks, after)
        hidden = self._model.hidden(batch, self._kv)
        if self._draws_on_device(chunks):
            return launch_draws(hidden, self._model.logits, chunks, batch.chunk_rows)
        return self._waited_for(self._results(hidden, batch.chunk_rows, chunks))

    def _batch(self, chunks: tuple[Chunk, ...], meanwhile: Callable[[], None] = lambda: None) -> Batch:
        device = self._model.device
        batch = make_batch(chunks, self._block_tokens, device, meanwhile, self._prefill.takes, self._groups)
        lowest, highest = (of(of(chunk.token_ids) for chunk in chunks) for of in (min, max))
        if lowest < 0 or highest >= self._model.config.vocab_size:  # on a GPU, the index error would end its context
            raise ValueError(f"token ids from {lowest} to {highest}; the model has {self._model.config.vocab_size}")
        return batch

    def _fault(self, chunk: Chunk) -> NonFinite | None:
        """The result of a chunk whose tokens the model does not have."""
        try:
            if all(0 <= token_id < self._model.config.vocab_size for token_id in array("q", chunk.token_ids)):
                return None
        except (TypeError, OverflowError):
            pass  # no integers, or beyond 64 bits
        return NonFinite("its tokens cannot be computed: one is not a token id of the model")

    def _launch_others(
        self, chunks: tuple[Chunk, ...], faults: Mapping[int, NonFinite], after: Launched | None
    ) -> Launched:
        """Computes the chunks that have no fault. `faults`: by position."""
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
        """To be called as the layers begin."""
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
        """`logits`: of all rows, where they are computed already."""
        failed = _non_finite_chunks(hidden, chunk_rows)
        drawn = iter(self._draw(hidden, chunk_rows, chunks, logits))
        of_chunks = [next(drawn) if chunk.samples else () for chunk in chunks]
        return tuple(
            NonFinite(kv_suspect=True) if index in failed else self._result(chunk, hidden, rows, of_chunks[index])
            for index, (chunk, rows) in enumerate(zip(chunks, chunk_rows, strict=True))
        )

    def follow(self, plan: Plan) -> None:
        """As another rank: moves blocks and computes KV, and draws nothing."""
        if self.weights is None:
            self.compute_kv(plan)
        else:
            self.weights.follow(plan)

    def compute_kv(self, plan: Plan) -> None:
        """As `follow`, by this runner's own model alone."""
        chunks = plan.chunks if self.weights is None else self.weights.without_numbers(plan.chunks)
        with self._on_device(), torch.inference_mode():
            self._move(plan)
            recorded = self._recorded
            if recorded is not None and chunks and (step := recorded.find(chunks)) is not None:
                recorded.run(step, chunks)
            elif chunks:
                self._model.hidden(self._batch(chunks), self._kv)

    def settle(self) -> None:
        """Waits until the device has done all launched moves of blocks."""
        with self._on_device():
            launched_moves(self._model.device).results()

    def close(self) -> None:
        """Ends the other ranks, if there are any. They also end with this process."""
        if self.other_ranks is not None:
            self.other_ranks.close()

    def warm_up(self) -> None:
        """Runs a few steps, so that the first requests do not pay for lazy set-up; records graphs.

        Writes to block 0: call it before any sequence owns blocks.
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
        if is_cuda and self.other_ranks is None and self._groups == 1:
            with self._on_device(), torch.inference_mode():
                self._prefill = choose(self._prefill_attention, self._model.config, self._kv)
        if self._graphs is None or not is_cuda:
            return
        if reason := why_not_recorded(self._model):
            logger.info("decode steps are launched kernel by kernel: %s", reason)
        else:
            if self.other_ranks is not None:
                self.other_ranks.record(*self._graphs)
            self.record(self._graphs)
        self._graphs = None

    @property
    def replays_steps(self) -> bool:
        """Whether decode steps without drafts are replayed, once it is warm, and others computed."""
        will_record = self._graphs is not None and self._model.device.type == "cuda"
        return self._recorded is not None or (will_record and why_not_recorded(self._model) is None)

    def record(self, sizes: GraphSizes, recorder: Recorder | None = None) -> None:
        """Decode steps of up to these sizes are replayed from now on. Of several ranks, all record the same at once."""
        self._recorded_sizes = sizes
        with self._on_device():
            self._recorded = RecordedSteps(self._model, self._kv, recorder or GraphRecorder(), sizes, self._groups)

    @property
    def model(self) -> Model:
        return self._model

    def beside(self, model: Model) -> "Runner":
        """Of another model of the same sizes, over the same pool. Its steps are not recorded."""
        other = Runner(model, self._layout, self._kv, self._host, self.other_ranks)
        other._prefill, other.weights = self._prefill, self.weights
        return other

    def take(self, model: Model) -> None:
        """In place of its own, which nothing uses any more. Steps that were recorded are recorded anew: padding alone,
        which writes to no block. Of several ranks, all do it at once.
        """
        self._model, self._recorded = model, None
        if self._recorded_sizes is not None:
            with torch.inference_mode():
                self.record(self._recorded_sizes)

    def _move(self, plan: Plan) -> None:
        if plan.swaps_out or plan.swaps_in:
            if self._host is None:
                raise ValueError("the plan swaps blocks, and there is no host memory for them")
            self._host.carry_out(plan.swaps_out)
            self._host.bring_back(plan.swaps_in)
        if plan.copies:
            pairs = [(copy.source, copy.destination) for copy in plan.copies]
            columns = [array("q", column) for column in zip(*pairs, strict=True)]
            sources, destinations = to_device(columns, self._kv.device)  # torch.tensor would wait for running work
            copy_blocks(self._kv, sources, destinations)

    def _draw(
        self,
        hidden: torch.Tensor,
        chunk_rows: Sequence[slice],
        chunks: tuple[Chunk, ...],
        logits: torch.Tensor | None,
    ) -> list[RowResult]:
        """Results of the chunks that have samples, in order; only their last tokens go through the head."""
        rows = [Row(chunk.samples, chunk.end) for chunk in chunks if chunk.samples]
        if not rows:
            return []
        last = [place.stop - 1 for chunk, place in zip(chunks, chunk_rows, strict=True) if chunk.samples]
        whole = hidden if logits is None else logits
        chosen = whole if last == list(range(len(whole))) else whole[last]
        return sample_each(self._model.logits(chosen) if logits is None else chosen, rows, self._clock)

    def _result(self, chunk: Chunk, hidden: torch.Tensor, rows: slice, drawn: RowResult) -> ChunkResult:
        """`rows` are those of this chunk."""
        if isinstance(drawn, NonFinite):
            return drawn
        prompt = () if chunk.scored is None else prompt_scores(self._model.logits, hidden[rows], chunk.scored)
        if prompt is None:
            return NonFinite()
        if chunk.pooled is not None:
            return self._pool(hidden[rows], chunk.pooled)
        # Scores are due now, late mask or not: the chunk that draws later has only the newest token, which scores none.
        return Computed(late=True, prompt=prompt) if drawn is None else Computed(drawn, prompt)

    def _pool(self, hidden: torch.Tensor, pooled: Pooled) -> ChunkResult:
        """`hidden`: of the chunk. Summed in float64: a mean over many chunks rounds once."""
        chosen = hidden[pooled.rows.start : pooled.rows.stop]
        if pooled.head_token_ids:
            logits = self._model.logits(chosen)
            if max(pooled.head_token_ids) >= logits.shape[-1]:  # of a classification head there are few
                return NonFinite(f"pooling.head_token_ids: the head has {logits.shape[-1]} outputs")
            made = logits[:, list(pooled.head_token_ids)]
        else:
            made = self._model.normal(chosen)
        return Computed(pooled=tuple(made.double().sum(0).tolist()))


def _nothing() -> None:
    pass


def _fill_in(batch: Batch, chunks: tuple[Chunk, ...], after: Launched) -> None:
    """Puts the tokens that the step before draws where chunks of this one follow it."""
    places = [chunk.follows for chunk in chunks if chunk.follows is not None]
    if not places:
        return
    rows = [rows.start for chunk, rows in zip(chunks, batch.chunk_rows, strict=True) if chunk.follows is not None]
    sources, targets = to_device((array("q", places), array("q", rows)), batch.token_ids.device)
    batch.token_ids[targets] = after.tokens[sources]


def _non_finite_chunks(hidden: torch.Tensor, chunk_rows: Sequence[slice]) -> set[int]:
    """Chunks of which any token is not finite after the last layer; KV that is not finite always shows up there."""
    if math.isfinite(hidden.sum()):
        return set()
    finite = finite_rows(hidden)
    return {index for index, rows in enumerate(chunk_rows) if not all(finite[rows])}
