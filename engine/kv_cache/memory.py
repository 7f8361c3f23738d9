"""Default size of the KV pool: on a GPU, the memory that is left after a trial of the largest step."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from baton.engine.config.model_config import EncoderConfig, ModelError
from baton.engine.kv_cache.layout import KvLayout
from baton.engine.kv_cache.sizing import StepMemory, recorded_logits_bytes, spare_kv_bytes
from baton.engine.lora.adapters import AdapterSet
from baton.engine.models.batch import Model
from baton.engine.on_device import made_on
from baton.engine.parallel.shard import shard_layout
from baton.engine.parallel.wire import RankOptions, StepToMeasure
from baton.engine.prepare import HandedOver, ModelOptions, PreparedModel, prepare_model
from baton.engine.request import Chunk, Plan, Sample
from baton.engine.runner.prefill_attention import library_bytes
from baton.engine.runner.runner import Runner
from baton.engine.sampling.params import SamplingParams
from baton.engine.sampling.sampler import draw_bytes
from baton.text.host.memory import total_bytes

CPU_KV_BYTES = 1 << 30
CPU_KV_SHARE = 0.25
ANY_BYTES = 1 << 50  # KV memory that is enough for any request; never allocated
DRAWN = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9)


@dataclass(frozen=True, slots=True)
class LargestStep:
    tokens: int
    sequences: int  # maximum number of sequences sampled in the step


def cpu_kv_bytes() -> int:
    """Return the default KV memory on a CPU: 1 GiB, but at most a quarter of the host memory."""
    return min(CPU_KV_BYTES, int(total_bytes() * CPU_KV_SHARE))


class MemoryMeter(Protocol):
    """Meter of a device's memory."""

    def begin(self) -> None:
        """Start a measurement: reset the recorded peak."""

    def read(self, pool_bytes: int) -> StepMemory:
        """Return the memory use since `begin`. `pool_bytes`: size of the pool that is part of it."""


class CudaMeter:
    """Memory meter of a GPU. Each call waits until the GPU is idle."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def read(self, pool_bytes: int) -> StepMemory:
        torch.cuda.synchronize(self._device)
        peak, allocated = torch.cuda.max_memory_allocated(self._device), torch.cuda.memory_allocated(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return StepMemory(total, free, allocated, peak, pool_bytes)


def prepare_with_spare_memory(
    asked: ModelOptions,
    step: LargestStep,
    utilization: float,
    adapters: AdapterSet | None = None,
    set_aside_bytes: int = 0,
    ranks: RankOptions | None = None,
    meter: Callable[[torch.device], MemoryMeter] = CudaMeter,
) -> PreparedModel:
    """Load the weights on a GPU and size the pool by the memory that they and a step leave.

    Ignores `asked.kv_memory_bytes`. `utilization`: this process's share of the GPU's memory. `adapters`: AdapterSet
    that can receive adapters later. `set_aside_bytes`: kept free for what is loaded later. Every rank measures its
    part; the rank with the least memory left decides. `ranks`: options of the other ranks.

    Raises: ModelError with the amounts if nothing is left; RankLost.
    """
    roomy = prepare_model(replace(asked, kv_memory_bytes=ANY_BYTES))
    if isinstance(roomy.config, EncoderConfig):
        return roomy  # its pool is bounded by ENCODER_TOKENS, without any measurement
    if asked.tensor_parallel > 1:
        return _prepare_ranks(roomy, step, utilization, ranks or RankOptions(), meter, adapters)
    model = roomy.load_model(progress=False, adapters=adapters)
    plan = largest_plan(step, roomy.layout, roomy.max_model_len)
    with _trying(step, model.device):
        trial = StepTrial(model, roomy.layout, plan, meter(model.device))
        trial.runner.run(plan)
    # Set aside what the measured step does not use: sampling on the host, recorded steps, library attention, drafts.
    set_aside_bytes += draw_bytes(step.sequences, model.config.vocab_size)
    set_aside_bytes += recorded_logits_bytes(step.sequences, model.config.vocab_size, model.dtype.itemsize)
    set_aside_bytes += library_bytes(model.config, model.dtype)
    set_aside_bytes += draft_bytes(roomy, step)
    pool_bytes = kv_bytes_left([trial.memory()], utilization, roomy.layout.block_bytes, set_aside_bytes)
    return replace(roomy.resized(pool_bytes), model=HandedOver(model), adapters=adapters)


def draft_bytes(prepared: PreparedModel, step: LargestStep) -> int:
    """Return the memory of the draft model, which is loaded later and never runs at the same time as the model."""
    draft = prepared.draft
    if draft is None:
        return 0
    recorded = recorded_logits_bytes(step.sequences, draft.config.vocab_size, draft.dtype.itemsize)
    return draft.weight_bytes + draft.pool_bytes + recorded + library_bytes(draft.config, draft.dtype)


def _prepare_ranks(
    roomy: PreparedModel,
    step: LargestStep,
    utilization: float,
    options: RankOptions,
    meter: Callable[[torch.device], MemoryMeter],
    adapters: AdapterSet | None,
) -> PreparedModel:
    degree, block_tokens = roomy.options.tensor_parallel, roomy.layout.block_tokens
    ranks = roomy.load_ranks(progress=False, options=options, adapters=adapters)
    with ExitStack() as undo:
        undo.callback(ranks.other_ranks.close)
        plan = largest_plan(step, roomy.layout, roomy.max_model_len)
        asked = StepToMeasure(roomy.kv_dtype_name, block_tokens, step.tokens, step.sequences, roomy.max_model_len)
        ranks.other_ranks.measure(asked)
        with _trying(step, ranks.model.device):
            trial = StepTrial(ranks.model, shard_layout(roomy.layout, degree), plan, meter(ranks.model.device))
            trial.runner.run(plan)
        memories = [trial.memory(), *ranks.other_ranks.memories()]
        drawn_bytes = draw_bytes(step.sequences, roomy.config.vocab_size)  # only one rank samples; all pools are equal
        left = kv_bytes_left(memories, utilization, shard_layout(roomy.layout, degree).block_bytes, drawn_bytes)
        prepared = replace(roomy.resized(left * degree), ranks=HandedOver(ranks), adapters=adapters)
        undo.pop_all()
    return prepared


def _trying(step: LargestStep, device: torch.device) -> AbstractContextManager[None]:
    return made_on(device, f"a step of {step.tokens} tokens and {step.sequences} sequences in addition to the weights")


class StepTrial:
    """Trial step that measures memory. It has its own blocks, which are freed with this object."""

    def __init__(self, model: Model, layout: KvLayout, plan: Plan, meter: MemoryMeter) -> None:
        blocks = 1 + max(block for chunk in plan.chunks for block in chunk.block_table)
        self._pool = torch.zeros(blocks * layout.block_bytes, dtype=torch.uint8, device=model.device)
        self._meter = meter
        self.runner = Runner(model, layout, layout.view(self._pool, blocks))
        meter.begin()

    def memory(self) -> StepMemory:
        """Return the memory after `runner` has computed the step."""
        return self._meter.read(len(self._pool))


def kv_bytes_left(
    memories: Sequence[StepMemory], utilization: float, block_bytes: int, set_aside_bytes: int = 0
) -> int:
    """Return the pool bytes per rank: the bytes left on the rank that has the fewest left. Raises: ModelError."""
    left, rank = min((spare_kv_bytes(each, utilization, set_aside_bytes), rank) for rank, each in enumerate(memories))
    if left < block_bytes:
        memory, where = memories[rank], f" (rank {rank})" if len(memories) > 1 else ""
        raise ModelError(
            f"gpu-memory-utilization {utilization} of {memory.total} bytes leaves no room for KV{where}: {memory.free} "
            f"are free, the weights take {memory.allocated - memory.pool} and a step {memory.peak - memory.allocated}"
        )
    return left


def largest_plan(step: LargestStep, layout: KvLayout, longest: int) -> Plan:
    """Return a step of the maximum size: one sampled token per sequence, and prompts for the remaining tokens.

    `longest`: maximum tokens of one sequence. All sequences share a few blocks, since the result is not used.
    """
    sample = (Sample(0, DRAWN),)
    answers = min(step.sequences, step.tokens) - 1
    chunks = [Chunk(number, [0], 0, [0] * layout.groups.count, sample) for number in range(answers)]
    left = step.tokens - answers
    while left > 0:
        tokens = min(left, longest)
        table = list(range(layout.groups.blocks(-(-tokens // layout.block_tokens))))
        chunks.append(Chunk(len(chunks), [0] * tokens, 0, table, sample))
        left -= tokens
    return Plan(tuple(chunks))
