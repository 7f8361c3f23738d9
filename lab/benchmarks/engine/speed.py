"""Speed of the engine in one process, with scheduler and sampling, next to the machine's limits: `baton bench engine`.

Prompts are random tokens, chunked by the scheduler; answers are greedy and ignore end tokens.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from baton.engine.config.model_config import ModelError
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.sizing import KvSizing
from baton.engine.prepare import ModelOptions, PreparedModel, prepare_model
from baton.engine.request import Request
from baton.engine.runner.engine import Engine
from baton.engine.runner.runner import Runner
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import PromptComputed, RequestFailed, SchedulerOutcome, TokenMade
from baton.lab.commands.bench_options import EngineBenchOptions
from baton.lab.report.limits import decode_step_bytes, measure_limits, prefill_flop
from baton.lab.report.result import ENGINE, Columns, ResultForm, show
from baton.launch import CommandFailed
from baton.launch.model_source import find_model
from baton.launch.paths import ROOT

BLOCK_TOKENS, STEP_TOKENS = 32, 512  # defaults of `baton up` on a CPU
CACHE_ROOT = bytes(32)
KV_MARGIN_TOKENS = 64  # two blocks per sequence, for tokens generated while other prompts are computed


@dataclass(frozen=True, slots=True)
class EngineSetup:
    folder: Path
    dtype: str
    quantize: str
    kv_cache_dtype: str
    batch: int  # maximum number of concurrent sequences
    tokens: int  # maximum length of a sequence, prompt and answer
    step_tokens: int = STEP_TOKENS


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    setup: EngineSetup
    prepared: PreparedModel
    runner: Runner


def load_engine(setup: EngineSetup) -> LoadedEngine:
    """Load an engine with KV for the largest batch. Raises: CommandFailed."""
    tokens = setup.tokens + setup.batch + KV_MARGIN_TOKENS
    roomy = ModelOptions(
        setup.folder,
        torch.device("cpu"),
        setup.dtype,
        BLOCK_TOKENS,
        kv_memory_bytes=1 << 50,
        max_model_len=None,
        kv_cache_dtype=setup.kv_cache_dtype,
        quantize=setup.quantize,
    )
    try:
        sizing = KvSizing.of(prepare_model(roomy).layout, 0, tokens)
        kv_bytes = setup.batch * sizing.request_blocks * sizing.block_bytes
        prepared = prepare_model(replace(roomy, kv_memory_bytes=kv_bytes, max_model_len=tokens))
        runner = prepared.load(torch.empty(prepared.pool_bytes, dtype=torch.uint8), progress=False)
    except ModelError as error:
        raise CommandFailed(str(error)) from error
    runner.warm_up()
    return LoadedEngine(setup, prepared, runner)


class EngineRun:
    """Engine for `batch` concurrent sequences on a loaded model. It is greedy, ignores end tokens, and has its own
    prefix cache.
    """

    def __init__(self, loaded: LoadedEngine, batch: int) -> None:
        prepared = loaded.prepared
        self.first_tokens: tuple[int, ...] = ()  # first tokens of the last `prefill_s`
        self._scheduler = Scheduler(
            BlockPool(prepared.total_blocks, prepared.layout.groups),
            prepared.layout.block_tokens,
            loaded.setup.step_tokens,
            batch,
        )
        self._engine = Engine(loaded.runner, self._scheduler)
        self._requests = 0

    def prefill_s(self, prompts: Sequence[Sequence[int]]) -> float:
        """Return the time until every prompt has its first token. Raises: CommandFailed."""
        self._add(prompts, new_tokens=1)
        made: dict[int, int] = {}
        started = time.perf_counter()
        while (outcomes := self._step()) is not None:
            made |= {each.request_id: each.drawn.token_id for each in outcomes if isinstance(each, TokenMade)}
        took_s = time.perf_counter() - started
        self.first_tokens = tuple(token for _, token in sorted(made.items()))
        return took_s

    def decode_steps_s(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[float]:
        """Return the duration of each decode step, in which every sequence generates a token.

        The prompts are cached if they were those of the last `prefill_s`. Raises: CommandFailed.
        """
        waiting = len(prompts)
        steps: list[float] = []
        self._add(prompts, new_tokens + len(prompts))  # extra tokens: the first sequence generates until all have begun
        while True:
            started = time.perf_counter()
            outcomes = self._step()
            if outcomes is None:
                return steps[:new_tokens]
            if not waiting:
                steps.append(time.perf_counter() - started)
            waiting -= sum(isinstance(outcome, PromptComputed) and outcome.ended for outcome in outcomes)

    def _add(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        params = SamplingParams(max_tokens=new_tokens)
        for prompt in prompts:
            self._scheduler.add(Request(self._requests, tuple(prompt), params, ()), CACHE_ROOT)
            self._requests += 1

    def _step(self) -> Sequence[SchedulerOutcome] | None:
        outcomes = self._engine.step()
        if outcomes is not None and any(isinstance(outcome, RequestFailed) for outcome in outcomes):
            raise CommandFailed("the model's logits are not finite")
        return outcomes


def random_prompts(vocab_size: int, batch: int, tokens: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(range(vocab_size), k=tokens) for _ in range(batch)]


PREFILL_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Median speeds. `read_bandwidth_fraction`: bytes that a decode step must read (weights and KV once) per second,
    over the machine's read limit. `flop_fraction`: arithmetic of prefill per second, over the machine's limit in the
    compute dtype. Either can exceed 1 with quantised weights.
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


COLUMNS: Columns[EngineSpeed] = {
    "batch": lambda speed: speed.batch,
    "prefill tokens/s": lambda speed: f"{speed.prefill_tokens_per_s:,.0f}",
    "of FLOP limit": lambda speed: f"{speed.flop_fraction:.0%}",
    "decode step ms": lambda speed: f"{speed.decode_step_ms:.2f}",
    "of read limit": lambda speed: f"{speed.read_bandwidth_fraction:.0%}",
}


def run_engine_bench(options: EngineBenchOptions) -> int:
    """Run the benchmark and print it. Raises: CommandFailed."""
    torch.set_num_threads(options.thread_count)
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
    last = speeds[-1]
    note = f"{last.threads} threads, {last.prompt_tokens} prompt tokens, {last.dtype}, weights {last.weights}; limits: "
    note += f"{last.limit_read_gb_per_s:.1f} GB/s, {last.limit_gflop_per_s:,.0f} GFLOP/s"
    show(speeds, options.json, ResultForm(COLUMNS, lambda speed: str(speed.batch), ENGINE), note)
    return 0


def _measure(loaded: LoadedEngine, options: EngineBenchOptions, batch: int) -> EngineSpeed:
    """Measure one batch size. Raises: CommandFailed."""
    prepared = loaded.prepared
    limits = measure_limits(prepared.dtype)
    run = EngineRun(loaded, batch)
    rounds = [
        random_prompts(prepared.config.vocab_size, batch, options.prompt_tokens, seed)
        for seed in range(1 + PREFILL_ROUNDS)
    ]
    run.prefill_s(rounds[0])  # warm-up: the first steps allocate memory and select kernels
    prefill_s = statistics.median(run.prefill_s(prompts) for prompts in rounds[1:])
    step_s = statistics.median(run.decode_steps_s(rounds[-1], options.new_tokens))
    step_bytes = decode_step_bytes(prepared, batch, options.prompt_tokens + options.new_tokens / 2)
    flop = prefill_flop(prepared.config, options.prompt_tokens) * batch
    return EngineSpeed(
        batch=batch,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        threads=options.thread_count,
        dtype=prepared.dtype_name,
        weights=str(prepared.weight_format),
        prefill_tokens_per_s=round(batch * options.prompt_tokens / prefill_s, 1),
        decode_step_ms=round(step_s * 1e3, 3),
        read_bandwidth_fraction=round(step_bytes / step_s / limits.read_bytes_per_s, 6),
        flop_fraction=round(flop / prefill_s / limits.flop_per_s, 6),
        limit_read_gb_per_s=limits.read_gb_per_s,
        limit_gflop_per_s=limits.gflop_per_s,
    )
