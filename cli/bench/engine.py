"""`baton bench engine`: speed of one process's engine, scheduler and sampling included, without sessions or transfers.

Prompts are random tokens, in chunks as the scheduler makes them; answers are greedy and never end early.
"""

import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from cli.bench.engine_run import STEP_TOKENS, EngineRun, EngineSetup, LoadedEngine, load_engine, random_prompts
from cli.bench.limits import measure_limits
from cli.bench.work import decode_step_bytes, prefill_flop
from cli.model_source import find_model
from cli.paths import ROOT

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
    step_tokens: int = STEP_TOKENS  # a step computes at most


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
        loaded = load_engine(
            EngineSetup(
                source.folder,
                options.dtype,
                options.quantize,
                options.kv_cache_dtype,
                max(options.batches),
                options.prompt_tokens + options.new_tokens,
                options.step_tokens,
            )
        )
        speeds = [_measure(loaded, options, batch) for batch in options.batches]
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


def _measure(loaded: LoadedEngine, options: EngineBenchOptions, batch: int) -> EngineSpeed:
    """Raises: CommandFailed."""
    prepared = loaded.prepared
    limits = measure_limits(prepared.dtype)
    run = EngineRun(loaded, batch)
    rounds = [
        random_prompts(prepared.config.vocab_size, batch, options.prompt_tokens, seed)
        for seed in range(1 + PREFILL_ROUNDS)
    ]
    run.prefill_s(rounds[0])  # not counted: first steps allocate, and choose
    prefill_s = statistics.median(run.prefill_s(prompts) for prompts in rounds[1:])
    step_s = statistics.median(run.decode_steps_s(rounds[-1], options.new_tokens))
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
        read_bandwidth_fraction=round(step_bytes / step_s / limits.read_bytes_per_s, 6),
        flop_fraction=round(flop / prefill_s / limits.flop_per_s, 6),
        limit_read_gb_per_s=round(limits.read_bytes_per_s / 1e9, 2),
        limit_gflop_per_s=round(limits.flop_per_s / 1e9, 1),
    )
