"""`baton bench curves`: decode step against batch and against context, time to first token against prompt length.

Each beside the time that reading and computing would take at this machine's limits, measured in the same run. Points
are measured several times over, up and down again, and the median counts.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from cli.bench.curves_report import Growth, Times, as_lines, as_picture, make_growth
from cli.bench.engine_run import KV_MARGIN_TOKENS, EngineRun, EngineSetup, load_engine, random_prompts
from cli.bench.limits import Limits, measure_limits
from cli.bench.machine import describe_machine
from cli.bench.statistics import median
from cli.bench.work import decode_step_bytes, decode_step_flop, prefill_flop
from cli.errors import CommandFailed
from cli.model_source import find_model
from cli.paths import ROOT
from engine.config_file import read_model_config
from engine.model_config import ModelError

FILES = {
    "decode step against batch": "batch",
    "decode step against context, batch 1": "context",
    "time to first token": "prompt",
}
DECODE_BY_BATCH, DECODE_BY_CONTEXT, TTFT = FILES


@dataclass(frozen=True, slots=True)
class CurvesOptions:
    model: str | None
    batches: tuple[int, ...]
    batch_context_tokens: int  # of each sequence, where the batch grows
    lengths: tuple[int, ...]  # of prompts, and of contexts at batch 1; those too long for the model are left out
    steps: int
    rounds: int
    threads: int
    dtype: str
    quantize: str


class Shape(NamedTuple):
    batch: int
    tokens: int  # of each prompt


def run_curves(options: CurvesOptions, folder: Path | None, as_json: bool) -> int:
    """Raises: CommandFailed."""
    torch.set_num_threads(options.threads)
    note = Console(stderr=True, highlight=False).print
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as scratch:
        source = find_model(options.model, ROOT, Path(scratch))
        growths, limits = measure_curves(options, source.folder, note)
    report = {
        "machine": describe_machine(),
        "model": source.name,
        "threads": options.threads,
        "dtype": options.dtype,
        "quantize": options.quantize,
        "batch_context_tokens": options.batch_context_tokens,
        "limit_read_gb_per_s": round(limits.read_bytes_per_s / 1e9, 2),
        "limit_gflop_per_s": round(limits.flop_per_s / 1e9, 1),
        "curves": [asdict(growth) for growth in growths],
    }
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "curves.json").write_text(json.dumps(report, indent=2) + "\n")
        for growth in growths:
            title = f"{source.name}, threads: {options.threads}"
            (folder / f"{FILES[growth.name]}.svg").write_text(as_picture(growth, title))
    print(json.dumps(report) if as_json else "\n".join(line for growth in growths for line in [*as_lines(growth), ""]))
    return 0


def measure_curves(options: CurvesOptions, folder: Path, note: Callable[[str], None]) -> tuple[list[Growth], Limits]:
    """Raises: CommandFailed."""
    wide = [Shape(batch, options.batch_context_tokens) for batch in options.batches]
    deep = [Shape(1, length) for length in fitting_lengths(options, folder)]
    measure_wide, measure_deep = (_Measurer(shapes, options, folder, note) for shapes in (wide, deep))
    before = measure_limits(measure_wide.loaded.prepared.dtype)
    for number in range(options.rounds):
        measure_wide.round(number)
        measure_deep.round(number)
    limits = best_of(before, measure_limits(measure_wide.loaded.prepared.dtype))
    by_batch = [(shape.batch, measure_wide.step(shape, limits)) for shape in wide]
    by_context = [(shape.tokens, measure_deep.step(shape, limits)) for shape in deep]
    by_prompt = [(shape.tokens, measure_deep.first_token(shape, limits)) for shape in deep]
    return [
        make_growth(DECODE_BY_BATCH, f"sequences of {options.batch_context_tokens} tokens", by_batch),
        make_growth(DECODE_BY_CONTEXT, "tokens of context", by_context),
        make_growth(TTFT, "prompt tokens", by_prompt),
    ], limits


def fitting_lengths(options: CurvesOptions, folder: Path) -> list[int]:
    """Raises: CommandFailed."""
    try:
        longest = read_model_config(folder).max_positions
    except ModelError as error:
        raise CommandFailed(str(error)) from error
    room = longest - options.steps - 1 - KV_MARGIN_TOKENS
    lengths = sorted({min(length, room) for length in options.lengths})
    if options.batch_context_tokens > room or len(lengths) < 2:
        raise CommandFailed(f"this model has {longest} positions: ask for shorter contexts")
    return lengths


def best_of(one: Limits, other: Limits) -> Limits:
    """Other processes can only have slowed either down."""
    return Limits(
        max(one.read_bytes_per_s, other.read_bytes_per_s),
        max(one.flop_per_s, other.flop_per_s),
    )


class _Measurer:
    """Prefill and decode steps of several shapes on one loaded engine, one round at a time."""

    def __init__(
        self, shapes: Sequence[Shape], options: CurvesOptions, folder: Path, note: Callable[[str], None]
    ) -> None:
        """Raises: CommandFailed."""
        batch, tokens = max(shape.batch for shape in shapes), max(shape.tokens for shape in shapes)
        setup = EngineSetup(folder, options.dtype, options.quantize, "auto", batch, tokens + options.steps)
        self.loaded = load_engine(setup)
        self._shapes = shapes
        self._steps = options.steps
        self._note = note
        self._prefills_s: dict[Shape, list[float]] = {shape: [] for shape in shapes}
        self._steps_s: dict[Shape, list[float]] = {shape: [] for shape in shapes}

    def round(self, number: int) -> None:
        """Up, and the next one down. Raises: CommandFailed."""
        vocab_size = self.loaded.prepared.config.vocab_size
        for shape in reversed(self._shapes) if number % 2 else self._shapes:
            run = EngineRun(self.loaded, shape.batch)
            prompts = random_prompts(vocab_size, shape.batch, shape.tokens, seed=number)
            prefill_s = run.prefill_s(prompts)
            step_s = median(run.decode_steps_s(prompts, self._steps))
            self._prefills_s[shape].append(prefill_s)
            self._steps_s[shape].append(step_s)
            times = f"{prefill_s * 1e3:,.1f} ms to first tokens, {step_s * 1e3:.2f} ms a step"
            self._note(f"round {number + 1}: {shape.batch} x {shape.tokens} tokens: {times}")

    def step(self, shape: Shape, limits: Limits) -> Times:
        prepared, context = self.loaded.prepared, shape.tokens + self._steps // 2
        reading_s = decode_step_bytes(prepared, shape.batch, context) / limits.read_bytes_per_s
        computing_s = decode_step_flop(prepared.config, shape.batch, context) / limits.flop_per_s
        return Times(median(self._steps_s[shape]) * 1e3, max(reading_s, computing_s) * 1e3)

    def first_token(self, shape: Shape, limits: Limits) -> Times:
        prepared = self.loaded.prepared
        reading_s = decode_step_bytes(prepared, 0, 0) / limits.read_bytes_per_s
        computing_s = prefill_flop(prepared.config, shape.tokens) / limits.flop_per_s
        return Times(median(self._prefills_s[shape]) * 1e3, max(reading_s, computing_s) * 1e3)
