"""Which attention computes chunks of prompts on a GPU: our kernel, which reads the pool in place, or PyTorch's over
keys and values that are gathered first. Both are measured at start, at shapes of the model; the faster one is kept.
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

from baton.engine.config.model_config import ModelConfig
from baton.engine.request import Chunk
from baton.kernels.attention import paged_prefills
from baton.kernels.gathered import is_fast_gathered
from baton.kernels.types import KvPages, PrefillChunks, Scoring

logger = logging.getLogger(__name__)

CHUNK_TOKENS = (256, 1024, 4096)
CONTEXT_TOKENS = (1024, 4096, 16384)
"""The last one also bounds the memory that is gathered: longer contexts are read in place."""
WORTH = 0.95  # of the other time: a near tie is no reason for a copy of the context
BUDGET_S = 2.0
ROUNDS = 5


class PrefillAttention(StrEnum):
    AUTO = "auto"
    TRITON = "triton"
    SDPA = "sdpa"


class ChunkShape(NamedTuple):
    tokens: int  # new ones
    context: int  # tokens up to the last new one


class Timed(NamedTuple):
    shape: ChunkShape
    in_place_s: float
    gathered_s: float


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """`gathered`: the shapes at which it pays to gather."""

    gathered: frozenset[ChunkShape] = frozenset()

    def gathers(self, chunk: Chunk) -> bool:
        """As at the shape with fewer tokens and a longer context, where gathering pays less than for this chunk."""
        tokens = max((each for each in CHUNK_TOKENS if each <= len(chunk.token_ids)), default=None)
        context = min((each for each in CONTEXT_TOKENS if each >= chunk.end), default=None)
        return tokens is not None and context is not None and ChunkShape(tokens, context) in self.gathered

    def __str__(self) -> str:
        if not self.gathered:
            return "reads the pool in place"
        shapes = ", ".join(f"{tokens} of {context}" for tokens, context in sorted(self.gathered))
        return f"gathers chunks of at least so many tokens in contexts of at most as many: {shapes}"


IN_PLACE = PrefillChoice()


def all_shapes() -> Iterator[ChunkShape]:
    for context in CONTEXT_TOKENS:
        for tokens in CHUNK_TOKENS:
            if tokens <= context:
                yield ChunkShape(tokens, context)


def decide(times: Sequence[Timed]) -> PrefillChoice:
    """A shape that was not measured is read in place."""
    return PrefillChoice(frozenset(each.shape for each in times if each.gathered_s < WORTH * each.in_place_s))


def gathered_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Memory of a step that only chunks which are gathered need: keys and values, and what they attended to."""
    kept = 2 * config.num_kv_heads * min(CONTEXT_TOKENS[-1], config.max_positions)
    return (kept + config.num_heads * min(CHUNK_TOKENS[-1], config.max_positions)) * config.head_dim * dtype.itemsize


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
    """Reads the pool and writes nothing to it. `kv`: in the dtype that is computed in, else it is never gathered."""
    if asked is PrefillAttention.TRITON or kv.scales is not None or not is_fast_gathered(config.num_heads, kv.layer(0)):
        choice, why = IN_PLACE, "asked for" if asked is PrefillAttention.TRITON else "nothing else can"
    elif asked is PrefillAttention.SDPA:
        choice, why = PrefillChoice(frozenset(all_shapes())), "asked for"
    else:
        started = now()
        times = _measured(config, kv, timer, lambda: now() - started > BUDGET_S)
        choice, why = decide(times), f"measured at {len(times)} shapes in {now() - started:.1f} s"
    logger.info("attention of prompts %s (%s)", choice, why)
    return choice


def _measured(config: ModelConfig, kv: KvPages, timer: Timer, is_late: Callable[[], bool]) -> list[Timed]:
    """Shapes that the pool and the model have room for, until it is late."""
    times: list[Timed] = []
    room = min(kv.blocks * kv.layer(0).block_tokens, config.max_positions)
    for shape in all_shapes():
        if shape.context > room or is_late():
            break
        in_place, gathered = _calls(shape, config.num_heads, kv)
        times.append(Timed(shape, timer(in_place), _seconds_or_never(timer, gathered)))
    return times


def _seconds_or_never(timer: Timer, gathered: Callable[[], None]) -> float:
    try:
        return timer(gathered)
    except RuntimeError as error:  # no kernel of PyTorch's takes it, or there is no memory for it
        logger.warning("attention over gathered keys and values fails: %s", error)
        return math.inf


def _calls(shape: ChunkShape, heads: int, kv: KvPages) -> tuple[Callable[[], None], Callable[[], None]]:
    """Of one layer, over whatever the pool's first blocks hold."""
    layer, start = kv.layer(0), shape.context - shape.tokens
    query = torch.randn(shape.tokens, heads, layer.head_dim, dtype=kv.data.dtype, device=kv.device)
    scoring, out = Scoring(layer.head_dim**-0.5), torch.empty_like(query)
    ids = torch.arange(-(-shape.context // layer.block_tokens), device=kv.device)
    one = PrefillChunks.one(shape.tokens, start, ids)

    def call(prefills: PrefillChunks) -> Callable[[], None]:
        return lambda: paged_prefills(query, layer, prefills, scoring, out)

    return call(one), call(replace(one, gathered=1))
