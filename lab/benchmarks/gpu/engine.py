"""Rows of the GPU table: step time of the engine, idle share of the device, and throughput of many requests."""

import math
import random
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.layout import kv_layout
from baton.engine.models.decoder import DecoderModel
from baton.engine.request import Request
from baton.engine.runner.cuda_graphs import GraphSizes
from baton.engine.runner.engine import Engine
from baton.engine.runner.runner import Runner
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import TokenMade
from baton.kernels.types import KvPages
from baton.lab.benchmarks.gpu.compilations import compilations
from baton.lab.benchmarks.gpu.drawn import drawn_model
from baton.lab.benchmarks.gpu.row import Bound, Figure, GpuRow, Setting, at_least, at_most, copy_bytes_per_s, said_copy

BLOCK_TOKENS = 32
SKIPPED_STEPS = 16  # warm-up steps


@dataclass(frozen=True, slots=True)
class EngineWork:
    """Prompts with the lengths of their answers."""

    prompts: Sequence[Sequence[int]]
    answer_tokens: Sequence[int]

    @property
    def most_tokens(self) -> int:
        return max(len(prompt) + answer for prompt, answer in zip(self.prompts, self.answer_tokens, strict=True))

    @property
    def blocks(self) -> int:
        pairs = zip(self.prompts, self.answer_tokens, strict=True)
        return sum(-(-(len(prompt) + answer) // BLOCK_TOKENS) + 1 for prompt, answer in pairs)


class DrawnEngine:
    """Engine on a random model, with recorded steps and a pool for the work. Answers ignore end tokens."""

    def __init__(self, shape: str, work: EngineWork, setting: Setting, step_tokens: int = 8192) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.decoder: DecoderModel = drawn_model(Path(folder), shape, setting.device, setting.dry)
        layout = kv_layout(self.decoder.config, torch.bfloat16, BLOCK_TOKENS)
        storage = torch.zeros(work.blocks * layout.block_bytes, dtype=torch.uint8, device=setting.device)
        self.kv: KvPages = layout.view(storage, work.blocks)
        runner = Runner(self.decoder, layout, self.kv)
        if setting.device.type == "cuda":
            runner.warm_up()
            runner.record(GraphSizes(len(work.prompts), -(-work.most_tokens // BLOCK_TOKENS)))
        self._scheduler = Scheduler(BlockPool(work.blocks), BLOCK_TOKENS, step_tokens, len(work.prompts))
        self._engine = Engine(runner, self._scheduler)
        self._requests = 0

    def run(self, work: EngineWork, params: SamplingParams) -> list[float]:
        """Run the work. Return the commit times of all steps that generated tokens, in seconds since the start."""
        for prompt, answer in zip(work.prompts, work.answer_tokens, strict=True):
            self._scheduler.add(Request(self._requests, tuple(prompt), replace(params, max_tokens=answer), ()))
            self._requests += 1
        started, made, times = time.perf_counter(), 0, []
        while (outcomes := self._engine.step()) is not None:
            tokens = sum(isinstance(outcome, TokenMade) for outcome in outcomes)
            made += tokens
            if tokens:
                times.append(time.perf_counter() - started)
        if made != sum(work.answer_tokens):
            raise RuntimeError(f"{made} of {sum(work.answer_tokens)} tokens generated: some logits were not finite")
        return times


def step_figures(shape: str, target_ms: float, setting: Setting) -> list[Figure]:
    """Measure the steps of a single answer: wall time, and the fraction of it in which the device is idle."""
    answer = setting.size(256, SKIPPED_STEPS + 4)
    work = EngineWork([list(range(100, setting.size(228, 110)))], [answer])
    engine = DrawnEngine(shape, work, setting)
    greedy = SamplingParams(max_tokens=answer)
    engine.run(work, greedy)
    times = engine.run(work, greedy)
    step_s = (times[-1] - times[SKIPPED_STEPS]) / (len(times) - 1 - SKIPPED_STEPS)
    busy_s = busy_seconds(engine, work.prompts[0], setting)
    decoder = engine.decoder
    read_bytes = sum(weight_bytes(decoder))
    bound_ms = read_bytes / copy_bytes_per_s(setting) * 1e3
    limit, target = f"{said_copy(setting)}: {bound_ms:.2f} ms", at_most(target_ms, Bound.MEMORY)
    return [
        Figure("step, batch 1", step_s * 1e3, "ms", target, limit),
        Figure("GPU idle", 1 - busy_s / step_s, "of a step", at_most(0.03), f"{busy_s * 1e3:.3f} ms at work"),
    ]


def weight_bytes(decoder: DecoderModel) -> list[int]:
    """Return the bytes of each projection that a step reads."""
    sizes = []
    for layer in decoder.layers:
        parts = (layer.qkv, layer.output, layer.feed_forward.gate_up, layer.feed_forward.down)  # type: ignore[union-attr]
        sizes += [part.weight.nbytes for part in parts]  # type: ignore[union-attr]
    return [*sizes, decoder.head.weight.nbytes]  # type: ignore[attr-defined]


def busy_seconds(engine: DrawnEngine, prompt: Sequence[int], setting: Setting) -> float:
    """Return the seconds for which a decode step of one answer keeps the device busy, with all its kernels.

    The prompt's step is excluded by subtracting the time of a short answer from that of a long one.
    Prints the kernels that ran.
    """
    if setting.device.type != "cuda":
        return 0.0
    few, many = SKIPPED_STEPS, 2 * SKIPPED_STEPS
    greedy = SamplingParams(max_tokens=1)
    busy_s = {}
    for tokens in (few, many):
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            engine.run(EngineWork([prompt], [tokens]), greedy)
            torch.cuda.synchronize(setting.device)
        ran = [event.time_range for event in seen.events() or () if event.device_type.name == "CUDA"]
        busy_s[tokens] = covered((each.start, each.end) for each in ran) / 1e6
    print(f"{many} tokens of one answer:\n{seen.key_averages().table(sort_by='self_device_time_total', row_limit=40)}")
    return (busy_s[many] - busy_s[few]) / (many - few)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the total time covered by the spans; overlaps count once."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def step_llama8b(setting: Setting) -> list[Figure]:
    return step_figures("llama8b", 4.65, setting)


def step_qwen06b(setting: Setting) -> list[Figure]:
    return step_figures("qwen0.6b", 0.75, setting)


NANO_VLLM = (256, 1024, 10000)


def nano_work(requests: int, longest: int, highest: int) -> EngineWork:
    """Draw the same requests as nano-vllm's benchmark: prompts and answers of 100 to 1024 tokens, ids up to `highest`.

    256 requests have 142,827 prompt tokens and 133,966 output tokens.
    """
    chance = random.Random(0)
    shortest = min(100, longest)
    prompts = [[chance.randint(0, highest) for _ in range(chance.randint(shortest, longest))] for _ in range(requests)]
    return EngineWork(prompts, [chance.randint(shortest, longest) for _ in range(requests)])


def throughput(setting: Setting) -> list[Figure]:
    work = nano_work(*setting.size(NANO_VLLM, (6, 20, 500)))
    engine = DrawnEngine("qwen0.6b", work, setting, step_tokens=16384)
    params = SamplingParams(max_tokens=1, temperature=0.6)
    small = EngineWork(work.prompts[:8], [8] * len(work.prompts[:8]))
    with compilations() as compiled:
        engine.run(small, params)
        took_s = engine.run(work, params)[-1]
    speed = sum(work.answer_tokens) / took_s
    prompt_tokens = sum(map(len, work.prompts))
    return [
        Figure("256 requests", speed, "output tokens/s", at_least(21000, Bound.MEMORY), said_copy(setting)),
        Figure("took", took_s, "s", None, f"{prompt_tokens} prompt, {sum(work.answer_tokens)} output tokens"),
        Figure("compiled after warm-up", len(compiled), "kernels", at_most(0), ", ".join(sorted(set(compiled)))),
    ]


ROWS = (GpuRow("throughput", throughput), GpuRow("step_qwen0.6b", step_qwen06b), GpuRow("step_llama8b", step_llama8b))
