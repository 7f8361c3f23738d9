"""How large the KV pool is where nobody said: on a GPU what the largest step leaves, which is found by computing it."""

import os
from dataclasses import dataclass, replace

import torch

from engine.lora.adapters import AdapterSet
from engine.model_config import ModelConfig, ModelError
from engine.models.model import Model
from engine.plan import Chunk, Plan, Sample
from engine.prepare import ModelOptions, PreparedModel, prepare_model
from engine.runner import Runner
from engine.sampling_params import SamplingParams
from engine.sizing import StepMemory, spare_kv_bytes

CPU_KV_BYTES = 1 << 30
CPU_KV_SHARE = 0.25
LOGITS_COPIES = 4  # float32 logits, and what sampling makes of them
ANY_BYTES = 1 << 50  # a pool that is never made, but larger than any request
DRAWN = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9)


@dataclass(frozen=True, slots=True)
class LargestStep:
    tokens: int
    sequences: int  # from whose logits tokens are drawn, at most


def cpu_kv_bytes() -> int:
    """At most 1 GiB, or a quarter of the memory."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(CPU_KV_BYTES, int(memory_bytes * CPU_KV_SHARE))


def prepare_with_spare_memory(
    asked: ModelOptions,
    step: LargestStep,
    utilization: float,
    adapters: AdapterSet | None = None,
    set_aside_bytes: int = 0,
) -> PreparedModel:
    """On a GPU: with the weights loaded, and a pool of what they and a step leave. `asked.kv_memory_bytes` is not read.

    `utilization`: share of the GPU's memory for this process; `adapters`, `set_aside_bytes`: may be loaded into it
    later. Raises: ModelError, naming the amounts, where nothing is left.
    """
    roomy = prepare_model(replace(asked, kv_memory_bytes=ANY_BYTES))
    if asked.tensor_parallel > 1:  # each rank would have to be measured
        return roomy.resized(_estimated_kv_bytes(roomy, step, utilization))
    model = roomy.load_model(progress=False, adapters=adapters)
    memory = step_memory(roomy, model, step)
    left = spare_kv_bytes(memory, utilization, set_aside_bytes)
    if left < roomy.layout.block_bytes:
        raise ModelError(
            f"gpu-memory-utilization {utilization} of {memory.total} bytes leaves no room for KV: {memory.free} are "
            f"free, the weights take {memory.allocated - memory.pool} and a step {memory.peak - memory.allocated}"
        )
    return replace(roomy.resized(left), model=model, adapters=adapters)


def step_memory(prepared: PreparedModel, model: Model, step: LargestStep) -> StepMemory:
    """Computes the step, and reads what it took. Waits for the GPU."""
    device = model.device
    plan = largest_plan(step, prepared.options.block_tokens, prepared.max_model_len)
    blocks = 1 + max(block for chunk in plan.chunks for block in chunk.block_table)
    storage = torch.zeros(blocks * prepared.layout.block_bytes, dtype=torch.uint8, device=device)
    runner = Runner(model, prepared.layout, prepared.layout.view(storage, blocks))
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner.run(plan)
    torch.cuda.synchronize(device)
    peak, allocated = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return StepMemory(total, free, allocated, peak, len(storage))


def largest_plan(step: LargestStep, block_tokens: int, longest: int) -> Plan:
    """A step of so many tokens: one drawn for each sequence but some prompts, which have the rest of the tokens.

    `longest`: tokens of one sequence. All of them have the same few blocks: nobody looks at what comes of it.
    """
    sample = (Sample(0, DRAWN),)
    answers = min(step.sequences, step.tokens) - 1
    chunks = [Chunk(number, [0], 0, [0], sample) for number in range(answers)]
    left = step.tokens - answers
    while left > 0:
        tokens = min(left, longest)
        table = list(range(-(-tokens // block_tokens)))
        chunks.append(Chunk(len(chunks), [0] * tokens, 0, table, sample))
        left -= tokens
    return Plan(tuple(chunks))


def _estimated_kv_bytes(prepared: PreparedModel, step: LargestStep, utilization: float) -> int:
    """Of all ranks together. Raises: ModelError."""
    device, ranks = prepared.options.device, prepared.options.tensor_parallel
    free, total = torch.cuda.mem_get_info(device)
    weights, working = prepared.weight_bytes // ranks, activation_bytes(prepared.config, step)
    memory = StepMemory(total, free - weights, allocated=weights, peak=weights + working, pool=0)
    left = spare_kv_bytes(memory, utilization)
    if left <= 0:
        raise ModelError(
            f"gpu-memory-utilization {utilization} of {total} bytes leaves no room for KV: {free} are free, the "
            f"weights of a rank take {weights} and a step up to {working}"
        )
    return left * ranks


def activation_bytes(config: ModelConfig, step: LargestStep) -> int:
    """An upper estimate of what one step allocates, in float32 throughout."""
    per_token = 4 * config.hidden_size + 3 * config.intermediate_size + 4 * config.num_heads * config.head_dim
    return 4 * (step.tokens * per_token + LOGITS_COPIES * step.sequences * config.vocab_size)
