"""Choice of the attention kernel for prompt chunks on a GPU: Baton's or a library's.

The library is FlashInfer if installed, and otherwise PyTorch's attention over gathered keys and values. Both are timed
at start for some shapes of the model, and the faster one is used.
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
"""Context lengths to measure. The last one also bounds the memory for gathering: longer contexts use our kernel."""
MIN_GAIN = 0.95  # a library is chosen if it needs less than this fraction of Baton's kernel's time
BUDGET_S = 2.0
ROUNDS = 5


class PrefillAttention(StrEnum):
    AUTO = "auto"
    TRITON = "triton"
    SDPA = "sdpa"
    FLASHINFER = "flashinfer"


class ChunkShape(NamedTuple):
    tokens: int  # tokens to compute
    context: int  # context length in tokens, including those to compute


class Timed(NamedTuple):
    shape: ChunkShape
    ours_s: float
    library_s: float


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """Chunk shapes that a library computes faster than Baton's kernel. `planner`: of FlashInfer; None: use PyTorch."""

    by_library: frozenset[ChunkShape] = frozenset()
    planner: FlashInferPrefill | None = None

    def takes(self, chunk: Chunk) -> bool:
        """Return whether the library computes this chunk.

        The measured shape with the next smaller (or equal) number of tokens and the next longer (or equal) context
        decides.
        """
        tokens = max((each for each in CHUNK_TOKENS if each <= len(chunk.token_ids)), default=None)
        context = min((each for each in CONTEXT_TOKENS if each >= chunk.end), default=None)
        return tokens is not None and context is not None and ChunkShape(tokens, context) in self.by_library

    def planned(self, batch: Batch) -> Batch:
        """Add FlashInfer's plan to the batch of the next step."""
        if self.planner is None or batch.prefills is None:
            return batch
        [only] = batch.groups  # a library is chosen only for a single layer group
        return replace(batch, groups=(replace(only, prefills=self.planner.plan(batch.prefills)),))

    def __str__(self) -> str:
        if not self.by_library:
            return "by Baton's kernel"
        library = "PyTorch's over gathered keys and values" if self.planner is None else "FlashInfer's"
        shapes = ", ".join(f"{tokens} of {context}" for tokens, context in sorted(self.by_library))
        return f"by {library} from these chunk sizes, up to these context lengths, in tokens: {shapes}"


OURS = PrefillChoice()


def all_shapes() -> Iterator[ChunkShape]:
    for context in CONTEXT_TOKENS:
        for tokens in CHUNK_TOKENS:
            if tokens <= context:
                yield ChunkShape(tokens, context)


def decide(times: Sequence[Timed]) -> frozenset[ChunkShape]:
    """Return the shapes for which the library is faster; unmeasured shapes use Baton's kernel."""
    return frozenset(each.shape for each in times if each.library_s < MIN_GAIN * each.ours_s)


def library_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the additional memory of a library's attention, in bytes, compared with Baton's kernel.

    It stores gathered keys and values, outputs, and a workspace.
    """
    if config.value_prefix is not None:
        return 0  # libraries cannot read a pool that stores values as prefixes of the keys
    kept = 2 * config.num_kv_heads * min(CONTEXT_TOKENS[-1], config.max_positions)
    attended = config.num_heads * min(CHUNK_TOKENS[-1], config.max_positions)
    return (kept + attended) * config.head_dim * dtype.itemsize + (WORKSPACE_BYTES if is_installed() else 0)


Timer = Callable[[Callable[[], object]], float]
"""Function that returns the seconds that a call takes on the device."""


def device_seconds(call: Callable[[], object]) -> float:
    """Return the median time of ROUNDS calls on the device, after one warm-up call. Waits for the device."""
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
    """Choose the kernels for prompt chunks, without changing the pool.

    Raises: ModelError if FlashInfer is asked for and cannot be loaded.
    """
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
    logger.info("prompt attention: %s (%s)", choice, why)
    return choice


def _planner(asked: PrefillAttention, heads: int, kv: KvLayer) -> FlashInferPrefill | None:
    """Return FlashInfer's planner, or None if it is not used.

    In automatic mode, its kernels must already be compiled, so that start does not wait. Raises: ModelError.
    """
    if kv.scales is not None or kv.value_prefix is not None or kv.data.dtype.itemsize != 2:
        return None
    if asked is not PrefillAttention.FLASHINFER and not (asked is PrefillAttention.AUTO and is_compiled()):
        return None
    try:
        return FlashInferPrefill(heads, kv)
    except (ImportError, OSError, RuntimeError) as error:
        if asked is PrefillAttention.FLASHINFER:
            raise ModelError(
                f"prefill-attention: flashinfer cannot be loaded: {error}; choose another value"
            ) from error
        logger.warning("FlashInfer cannot be loaded: %s; using other attention kernels", error)
        return None


def _measured(
    config: ModelConfig, kv: KvPages, planner: FlashInferPrefill | None, timer: Timer, is_late: Callable[[], bool]
) -> list[Timed]:
    """Time the shapes that pool and model allow, the largest first, until time is up."""
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
    except (RuntimeError, ValueError) as error:  # unsupported shape, or out of memory
        logger.warning("library attention failed: %s; using Baton's kernel for this shape", error)
        return math.inf


def _calls(
    shape: ChunkShape, heads: int, kv: KvPages, planner: FlashInferPrefill | None
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return two functions that compute one layer's attention over arbitrary KV: our kernel, and the library's."""
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
