"""`baton bench engine`: speed of one process's engine, scheduler and sampling included, without sessions or transfers.

Prompts are random tokens, in chunks as the scheduler makes them; answers are greedy and never end early.
"""

import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from cli.bench.limits import measure_limits
from cli.bench.work import decode_step_bytes, prefill_flop
from cli.errors import CommandFailed
from cli.model_source import find_model
from cli.paths import ROOT
from engine.engine import Engine
from engine.mixed_scheduler import MixedScheduler
from engine.mixed_state import MixedOutcome, PromptComputed, RequestFailed
from engine.model_config import ModelError
from engine.pages import BlockPool
from engine.prepare import ModelOptions, PreparedModel, prepare_model
from engine.runner import Runner
from engine.sampling_params import SamplingParams
from engine.sequence import Request, blocks_for

BLOCK_TOKENS, STEP_TOKENS = 32, 512  # as `baton up` has them on a CPU
CACHE_ROOT = bytes(32)
KV_MARGIN_TOKENS = 64  # per sequence: two blocks, for what sequences make while others' prompts are computed
PREFILL_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class EngineBenchOptions:
    model: str | None  # folder or hub id; None: the demo model
    prompt_tokens: int
    new_tokens: int
    batches: tuple[int, ...]  # sequences at once
    threads: int
    dtype: str
    quantize: str
    kv_cache_dtype: str


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Medians. `read_bandwidth_fraction`: bytes a decode step must read (weights once, KV once) per second of it, of
    what this machine reads at most. `flop_fraction`: arithmetic of prefill per second, of what this machine does at
    most in the dtype that the model computes in. Quantised weights may take either past 1.
    """

    batch: int
    prompt_tokens: int
    new_tokens: int
    threads: int
    dtype: str
    weights: str
    prefill_tokens_per_s: float
    decode_step_ms: float
    read_bandwidth_fraction: float
    flop_fraction: float
    limit_read_gb_per_s: float
    limit_gflop_per_s: float


def run_engine_bench(options: EngineBenchOptions, as_json: bool) -> int:
    """Raises: CommandFailed."""
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as scratch:
        source = find_model(options.model, ROOT, Path(scratch))
        try:
            prepared = _prepare(options, source.folder)
            runner = prepared.load(torch.empty(prepared.pool_bytes, dtype=torch.uint8), progress=False)
        except ModelError as error:
            raise CommandFailed(str(error)) from error
        speeds = [_measure(prepared, runner, options, batch) for batch in options.batches]
    print(json.dumps([asdict(speed) for speed in speeds]) if as_json else as_table(speeds))
    return 0


def as_table(speeds: Sequence[EngineSpeed]) -> str:
    lines = ["batch  prefill tokens/s  of FLOP limit  decode step ms  of read limit"]
    for speed in speeds:
        lines.append(
            f"{speed.batch:5}  {speed.prefill_tokens_per_s:16,.0f}  {speed.flop_fraction:13.0%}"
            f"  {speed.decode_step_ms:14.2f}  {speed.read_bandwidth_fraction:13.0%}"
        )
    last = speeds[-1]
    lines.append(
        f"{last.threads} threads, {last.prompt_tokens} prompt tokens, {last.dtype}, weights {last.weights}; "
        f"limits: {last.limit_read_gb_per_s:.1f} GB/s, {last.limit_gflop_per_s:,.0f} GFLOP/s"
    )
    return "\n".join(lines)


def _measure(prepared: PreparedModel, runner: Runner, options: EngineBenchOptions, batch: int) -> EngineSpeed:
    """Raises: CommandFailed."""
    limits = measure_limits(prepared.dtype)
    run = EngineRun(prepared, runner, options, batch)
    run.prefill_s(seed=0)  # not counted: first steps allocate, and choose
    prefill_s = statistics.median(run.prefill_s(seed) for seed in range(1, 1 + PREFILL_ROUNDS))
    step_s = statistics.median(run.decode_steps_s(seed=PREFILL_ROUNDS))
    step_bytes = decode_step_bytes(prepared, batch, options.prompt_tokens + options.new_tokens / 2)
    flop = prefill_flop(prepared.config, options.prompt_tokens) * batch
    return EngineSpeed(
        batch=batch,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        threads=options.threads,
        dtype=prepared.dtype_name,
        weights=str(prepared.weight_format),
        prefill_tokens_per_s=round(batch * options.prompt_tokens / prefill_s, 1),
        decode_step_ms=round(step_s * 1e3, 3),
        read_bandwidth_fraction=round(step_bytes / step_s / limits.read_bytes_per_s, 3),
        flop_fraction=round(flop / prefill_s / limits.flop_per_s, 3),
        limit_read_gb_per_s=round(limits.read_bytes_per_s / 1e9, 2),
        limit_gflop_per_s=round(limits.flop_per_s / 1e9, 1),
    )


class EngineRun:
    """`batch` sequences at once on a loaded model, with a prefix cache of its own."""

    def __init__(self, prepared: PreparedModel, runner: Runner, options: EngineBenchOptions, batch: int) -> None:
        self._options = options
        self._batch = batch
        self._vocab_size = prepared.config.vocab_size
        self._scheduler = MixedScheduler(
            BlockPool(prepared.total_blocks), prepared.layout.block_tokens, STEP_TOKENS, batch
        )
        self._engine = Engine(runner, self._scheduler)
        self._requests = 0

    def prefill_s(self, seed: int) -> float:
        """Until every prompt has its first token."""
        self._add(seed, new_tokens=1)
        started = time.perf_counter()
        while self._step() is not None:
            pass
        return time.perf_counter() - started

    def decode_steps_s(self, seed: int) -> list[float]:
        """Steps in which every sequence makes a token. After `prefill_s` of this seed the prompts are in the cache."""
        waiting = self._batch
        steps: list[float] = []
        self._add(seed, self._options.new_tokens + self._batch)
        while True:
            started = time.perf_counter()
            outcomes = self._step()
            if outcomes is None:
                return steps[: self._options.new_tokens]
            if not waiting:
                steps.append(time.perf_counter() - started)
            waiting -= sum(isinstance(outcome, PromptComputed) and outcome.ended for outcome in outcomes)

    def _add(self, seed: int, new_tokens: int) -> None:
        draw = random.Random(seed)
        params = SamplingParams(max_tokens=new_tokens)
        for _ in range(self._batch):
            prompt = tuple(draw.randrange(self._vocab_size) for _ in range(self._options.prompt_tokens))
            self._scheduler.add(Request(self._requests, prompt, params, ()), CACHE_ROOT)
            self._requests += 1

    def _step(self) -> Sequence[MixedOutcome] | None:
        outcomes = self._engine.step()
        if outcomes is not None and any(isinstance(outcome, RequestFailed) for outcome in outcomes):
            raise CommandFailed("the model's logits are not finite")
        return outcomes


def _prepare(options: EngineBenchOptions, folder: Path) -> PreparedModel:
    """With KV for the largest batch. Raises: ModelError."""
    batch = max(options.batches)
    tokens = options.prompt_tokens + options.new_tokens + batch + KV_MARGIN_TOKENS
    roomy = ModelOptions(
        folder,
        torch.device("cpu"),
        options.dtype,
        BLOCK_TOKENS,
        kv_memory_bytes=1 << 50,
        max_model_len=None,
        kv_cache_dtype=options.kv_cache_dtype,
        quantize=options.quantize,
    )
    kv_bytes = batch * blocks_for(tokens, BLOCK_TOKENS) * prepare_model(roomy).layout.block_bytes
    return prepare_model(replace(roomy, kv_memory_bytes=kv_bytes, max_model_len=tokens))
