"""Which attention computes chunks of prompts on a GPU: our kernel, or a library's, which is FlashInfer's where that is
installed and else PyTorch's over keys and values that are gathered first. Both are measured at start, at some shapes of
the model, and the faster one is kept.
"""

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

import torch

from baton.engine.config.model_config import ModelConfig, ModelError
from baton.engine.models.batch import Batch
from baton.engine.request import Chunk
from baton.kernels.attention import paged_prefills
from baton.kernels.libraries.flashinfer import WORKSPACE_BYTES, FlashInferPrefill, is_compiled, is_installed
from baton.kernels.libraries.gathered import is_fast_gathered
from baton.kernels.types import KvLayer, KvPages, PrefillChunks, Scoring

logger = logging.getLogger(__name__)

CHUNK_TOKENS = (256, 1024, 4096)
CONTEXT_TOKENS = (1024, 4096, 16384)
"""The last one also bounds the memory that is gathered: longer contexts are ours."""
MIN_GAIN = 0.95  # of the other time: a near tie is no reason for anything but our own
BUDGET_S = 2.0
ROUNDS = 5


class PrefillAttention(StrEnum):
    AUTO = "auto"
    TRITON = "triton"
    SDPA = "sdpa"
    FLASHINFER = "flashinfer"


class ChunkShape(NamedTuple):
    tokens: int  # new ones
    context: int  # tokens up to the last new one


class Timed(NamedTuple):
    shape: ChunkShape
    ours_s: float
    library_s: float


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """`by_library`: the shapes at which a library is faster. `planner`: FlashInfer, where that is the library."""

    by_library: frozenset[ChunkShape] = frozenset()
    planner: FlashInferPrefill | None = None

    def takes(self, chunk: Chunk) -> bool:
        """As at the shape with fewer tokens and a longer context, where gathering pays less than for this chunk."""
        tokens = max((each for each in CHUNK_TOKENS if each <= len(chunk.token_ids)), default=None)
        context = min((each for each in CONTEXT_TOKENS if each >= chunk.end), default=None)
        return tokens is not None and context is not None and ChunkShape(tokens, context) in self.by_library

    def planned(self, batch: Batch) -> Batch:
        """For the step that begins."""
        if self.planner is None or batch.prefills is None:
            return batch
        [only] = batch.groups  # with several, no library is chosen
        return replace(batch, groups=(replace(only, prefills=self.planner.plan(batch.prefills)),))

    def __str__(self) -> str:
        if not self.by_library:
            return "by Baton's kernel"
        library = "PyTorch's over gathered keys and values" if self.planner is None else "FlashInfer's"
        shapes = ", ".join(f"{tokens} of {context}" for tokens, context in sorted(self.by_library))
        return f"by {library} for chunks of at least so many tokens in contexts of at most as many: {shapes}"


OURS = PrefillChoice()


def all_shapes() -> Iterator[ChunkShape]:
    for context in CONTEXT_TOKENS:
        for tokens in CHUNK_TOKENS:
            if tokens <= context:
                yield ChunkShape(tokens, context)


def decide(times: Sequence[Timed]) -> frozenset[ChunkShape]:
    """The shapes for the library; one that was not measured is ours."""
    return frozenset(each.shape for each in times if each.library_s < MIN_GAIN * each.ours_s)


def library_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Memory that only chunks of a library need: gathered keys and values, and what they attended to; a workspace."""
    if config.value_prefix is not None:
        return 0  # no library reads its pool
    kept = 2 * config.num_kv_heads * min(CONTEXT_TOKENS[-1], config.max_positions)
    attended = config.num_heads * min(CHUNK_TOKENS[-1], config.max_positions)
    return (kept + attended) * config.head_dim * dtype.itemsize + (WORKSPACE_BYTES if is_installed() else 0)


Timer = Callable[[Callable[[], object]], float]
"""Seconds that a call takes on the device."""


def device_seconds(call: Callable[[], object]) -> float:
    """Median of some rounds, by events on the current stream, after one that is not counted. Waits for the device."""
    call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
    for mark in marks[:-1]:
        mark.record()
        call()
    marks[-1].record()
    marks[-1].synchronize()
    times_ms: list[float] = [first.elapsed_time(then) for first, then in pairwise(marks)]
    return statistics.median(times_ms) / 1e3


def choose(
    asked: PrefillAttention,
    config: ModelConfig,
    kv: KvPages,
    timer: Timer = device_seconds,
    now: Callable[[], float] = time.monotonic,
) -> PrefillChoice:
    """Reads the pool and writes nothing to it. Raises: ModelError where FlashInfer is asked for and does not load."""
    choice, why, layer = OURS, "asked for", kv.layer(0)
    if asked is not PrefillAttention.TRITON:
        planner = _planner(asked, config.num_heads, layer)
        if (
            kv.scales is not None
            or kv.value_prefix is not None
            or (planner is None and not is_fast_gathered(config.num_heads, layer))
        ):
            why = "nothing else reads this pool"
        elif asked is not PrefillAttention.AUTO:
            choice = PrefillChoice(frozenset(all_shapes()), planner)
        else:
            started = now()
            times = _measured(config, kv, planner, timer, lambda: now() - started > BUDGET_S)
            choice = PrefillChoice(decide(times), planner)
            why = f"measured at {len(times)} shapes in {now() - started:.1f} s"
    logger.info("attention of prompts %s (%s)", choice, why)
    return choice


def _planner(asked: PrefillAttention, heads: int, kv: KvLayer) -> FlashInferPrefill | None:
    """Without being asked for, only where its kernels are compiled: a start must not wait for that."""
    if kv.scales is not None or kv.value_prefix is not None or kv.data.dtype.itemsize != 2:
        return None
    if asked is not PrefillAttention.FLASHINFER and not (asked is PrefillAttention.AUTO and is_compiled()):
        return None
    try:
        return FlashInferPrefill(heads, kv)
    except (ImportError, OSError, RuntimeError) as error:
        if asked is PrefillAttention.FLASHINFER:
            raise ModelError(f"prefill-attention is flashinfer, which does not load: {error}") from error
        logger.warning("FlashInfer does not load: %s", error)
        return None


def _measured(
    config: ModelConfig, kv: KvPages, planner: FlashInferPrefill | None, timer: Timer, is_late: Callable[[], bool]
) -> list[Timed]:
    """Shapes that the pool and the model have room for, the largest first, until it is late."""
    times: list[Timed] = []
    room = min(kv.blocks * kv.layer(0).block_tokens, config.max_positions)
    for shape in reversed([each for each in all_shapes() if each.context <= room]):
        if is_late():
            break
        ours, library = _calls(shape, config.num_heads, kv, planner)
        times.append(Timed(shape, timer(ours), _seconds_or_never(timer, library)))
    return times


def _seconds_or_never(timer: Timer, library: Callable[[], None]) -> float:
    try:
        return timer(library)
    except (RuntimeError, ValueError) as error:  # none of its kernels takes it, or there is no memory for it
        logger.warning("a library's attention fails: %s", error)
        return math.inf


def _calls(
    shape: ChunkShape, heads: int, kv: KvPages, planner: FlashInferPrefill | None
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Ours and the library's of one layer, over whatever the pool's first blocks hold."""
    layer, start = kv.layer(0), shape.context - shape.tokens
    query = torch.randn(shape.tokens, heads, layer.head_dim, dtype=kv.data.dtype, device=kv.device)
    scoring, out = Scoring(layer.head_dim**-0.5), torch.empty_like(query)
    ids = torch.arange(-(-shape.context // layer.block_tokens), device=kv.device)
    one = PrefillChunks.one(shape.tokens, start, ids)

    def library() -> None:
        marked = replace(one, by_library=1)
        planned = marked if planner is None else planner.plan(marked)
        paged_prefills(query, layer, planned, scoring, out)

    return lambda: paged_prefills(query, layer, one, scoring, out), library
