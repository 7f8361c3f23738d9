"""Curves of `baton bench curves`: decode step against batch and context, time to first token against prompt.

Each is shown next to the time that reading and computing would take at this machine's limits, measured in the same run.
Points are measured in several rounds, alternately in rising and falling order; the median counts.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Console

from baton.cli.options import read_sizes
from baton.engine.config.config_file import read_model_config
from baton.engine.config.model_config import ModelError
from baton.lab.benchmarks.engine.speed import (
    KV_MARGIN_TOKENS,
    STEP_TOKENS,
    EngineRun,
    EngineSetup,
    load_engine,
    random_prompts,
)
from baton.lab.commands.bench_options import CurvesOptions
from baton.lab.report.limits import Limits, decode_step_bytes, decode_step_flop, measure_limits, prefill_flop
from baton.lab.report.picture import Axis, DrawnCurve, LineChart, draw_lines
from baton.lab.report.result import ENGINE, Columns, Result, make_result, table, write_pictures
from baton.lab.report.statistics import Line, fit_line
from baton.launch import CommandFailed
from baton.launch.model_source import find_model
from baton.launch.paths import ROOT
from baton.text.pooler_files import ModelKind, kind_of

FEWEST_TICKS = 4


@dataclass(frozen=True, slots=True)
class Times:
    measured_ms: float
    limit_ms: float  # time at the bandwidth and arithmetic rate that were measured in the same run


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    measured_ms: float
    limit_ms: float


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth of one curve, by least-squares lines through all points.

    `growth`: slope of the line of measured times over the limit's times; 1: measured times grow like the limit's. A
    constant overhead in the measured times does not change the slope.
    """

    name: str
    x_name: str
    points: tuple[Point, ...]
    slope_ms: float  # milliseconds per unit of x
    intercept_ms: float
    limit_slope_ms: float
    growth: float
    r_squared: float  # r² of the line of measured times over the limit's times

    @property
    def line(self) -> Line:
        return Line(self.slope_ms, self.intercept_ms, self.r_squared)


def make_growth(name: str, x_name: str, times: Sequence[tuple[int, Times]]) -> Growth:
    """Fit a curve. Raises: ValueError for fewer than two different x."""
    points = tuple(Point(x, each.measured_ms, each.limit_ms) for x, each in times)
    xs = [float(point.x) for point in points]
    measured, limits = [point.measured_ms for point in points], [point.limit_ms for point in points]
    line, against_limit = fit_line(xs, measured), fit_line(limits, measured)
    return Growth(
        name,
        x_name,
        points,
        line.slope,
        line.intercept,
        fit_line(xs, limits).slope,
        against_limit.slope,
        against_limit.r_squared,
    )


def as_picture(growth: Growth, title: str) -> str:
    """Draw a curve, on logarithmic axes if x spans a factor of more than 50."""
    xs = [point.x for point in growth.points]
    is_log = max(xs) / min(xs) > 50
    ticks = tuple(float(x) for x in xs) if len(xs) >= FEWEST_TICKS and is_log else ()
    fitted = tuple((float(x), growth.line.at(x)) for x in (min(xs), max(xs)))
    curves = [
        DrawnCurve("measured", tuple((float(point.x), point.measured_ms) for point in growth.points)),
        DrawnCurve("limit", tuple((float(point.x), point.limit_ms) for point in growth.points), is_dashed=True),
    ]
    if not is_log:
        curves.append(DrawnCurve(f"fit: {growth.slope_ms:.3g} ms each", fitted, is_dashed=True))
    axes = Axis(growth.x_name, is_log, ticks), Axis("milliseconds", is_log)
    return draw_lines(LineChart(f"{title}: {growth.name}", *axes, tuple(curves)))


def as_lines(growth: Growth) -> list[str]:
    """Return the curve as text for a terminal."""
    columns: Columns[Point] = {
        growth.x_name: lambda point: f"{point.x:,}",
        "measured ms": lambda point: f"{point.measured_ms:.2f}",
        "limit ms": lambda point: f"{point.limit_ms:.2f}",
        "of limit": lambda point: f"{point.limit_ms / point.measured_ms:.0%}",
    }
    slopes = f"slope {growth.slope_ms:.4g} ms, the limit's {growth.limit_slope_ms:.4g} ms; measured grows "
    slopes += f"{growth.growth:.2f} times as fast as the limit (r^2 {growth.r_squared:.3f})"
    return [growth.name, table(growth.points, columns), slopes]


FILES = {
    "decode step against batch": "batch",
    "decode step against context, batch 1": "context",
    "time to first token": "prompt",
}
DECODE_BY_BATCH, DECODE_BY_CONTEXT, TTFT = FILES


class PromptShape(NamedTuple):
    batch: int
    tokens: int  # length of each prompt


def run_curves(options: CurvesOptions) -> int:
    """Measure and print the curves. Raises: CommandFailed."""
    report, growths = curves_report(options, Console(stderr=True, highlight=False).print)
    if options.folder is not None:
        title = f"{report['model']}, threads: {options.thread_count}"
        write_pictures(options.folder, {FILES[growth.name]: as_picture(growth, title) for growth in growths})
        (options.folder / "curves.json").write_text(json.dumps(report, indent=2) + "\n")
    text = "\n".join(line for growth in growths for line in [*as_lines(growth), ""])
    print(json.dumps(report) if options.json else text)
    return 0


class CurvesReport(NamedTuple):
    report: Result  # content of curves.json
    growths: list[Growth]


def curves_report(options: CurvesOptions, note: Callable[[str], None]) -> CurvesReport:
    """Measure the curves. Raises: CommandFailed."""
    torch.set_num_threads(options.thread_count)
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as scratch:
        source = find_model(options.model, ROOT, Path(scratch))
        if (kind := kind_of(source.folder)) is not ModelKind.LANGUAGE_MODEL:
            raise CommandFailed(f"{source.name} is {kind}: curves need a model that generates answers")
        measured = measure_curves(options, source.folder, note)
    report = make_result(
        ENGINE,
        measured.rounds,
        None,
        model=source.name,
        threads=options.thread_count,
        dtype=options.dtype,
        quantize=options.quantize,
        batch_context_tokens=options.batch_context,
        step_tokens=STEP_TOKENS,
        limit_read_gb_per_s=measured.limits.read_gb_per_s,
        limit_gflop_per_s=measured.limits.gflop_per_s,
        curves=[asdict(growth) for growth in measured.growths],
    )
    return CurvesReport(report, measured.growths)


class MeasuredCurves(NamedTuple):
    growths: list[Growth]
    limits: Limits
    rounds: list[dict[str, Any]]  # milliseconds of each point in each round


def measure_curves(options: CurvesOptions, folder: Path, note: Callable[[str], None]) -> MeasuredCurves:
    """Measure the curves and the machine's limits. Raises: CommandFailed."""
    wide = [PromptShape(batch, options.batch_context) for batch in options.batches]
    deep = [PromptShape(1, length) for length in fitting_lengths(options, folder)]
    measure_wide, measure_deep = (_Measurer(shapes, options, folder, note) for shapes in (wide, deep))
    before = measure_limits(measure_wide.loaded.prepared.dtype)
    for number in range(options.rounds):
        measure_wide.round(number)
        measure_deep.round(number)
    limits = best_of(before, measure_limits(measure_wide.loaded.prepared.dtype))
    by_batch = [(shape.batch, measure_wide.step(shape, limits)) for shape in wide]
    by_context = [(shape.tokens, measure_deep.step(shape, limits)) for shape in deep]
    by_prompt = [(shape.tokens, measure_deep.first_token(shape, limits)) for shape in deep]
    growths = [
        make_growth(DECODE_BY_BATCH, f"sequences of {options.batch_context} tokens", by_batch),
        make_growth(DECODE_BY_CONTEXT, "tokens of context", by_context),
        make_growth(TTFT, "prompt tokens", by_prompt),
    ]
    rounds = [measure_wide.times_ms(number) | measure_deep.times_ms(number) for number in range(options.rounds)]
    return MeasuredCurves(growths, limits, rounds)


def fitting_lengths(options: CurvesOptions, folder: Path) -> list[int]:
    """Return the lengths that fit the model's context. Raises: CommandFailed."""
    try:
        longest = read_model_config(folder).max_positions
    except ModelError as error:
        raise CommandFailed(str(error)) from error
    room = longest - options.steps - 1 - KV_MARGIN_TOKENS
    lengths = sorted({min(length, room) for length in read_sizes(options.lengths, "--lengths")})
    if options.batch_context > room or len(lengths) < 2:
        raise CommandFailed(f"this model has {longest} positions: shorten --batch-context and --lengths")
    return lengths


def best_of(one: Limits, other: Limits) -> Limits:
    """Return the better value of each limit, since other processes can only slow a measurement down."""
    return Limits(max(one.read_bytes_per_s, other.read_bytes_per_s), max(one.flop_per_s, other.flop_per_s))


class _Measurer:
    """Prefill and decode steps of several shapes on one loaded engine, one round at a time."""

    def __init__(
        self, shapes: Sequence[PromptShape], options: CurvesOptions, folder: Path, note: Callable[[str], None]
    ) -> None:
        """Load the engine. Raises: CommandFailed."""
        batch, tokens = max(shape.batch for shape in shapes), max(shape.tokens for shape in shapes)
        setup = EngineSetup(folder, options.dtype, options.quantize, "auto", batch, tokens + options.steps)
        self.loaded = load_engine(setup)
        self._shapes = shapes
        self._steps = options.steps
        self._note = note
        self._prefills_s: dict[PromptShape, list[float]] = {shape: [] for shape in shapes}
        self._steps_s: dict[PromptShape, list[float]] = {shape: [] for shape in shapes}

    def round(self, number: int) -> None:
        """Measure every point: in rising order in one round, in falling order in the next. Raises: CommandFailed."""
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

    def times_ms(self, number: int) -> dict[str, Any]:
        """Return the times of a round by batch and tokens, in milliseconds."""
        return {
            f"{shape.batch} x {shape.tokens}": {
                "first_tokens": self._prefills_s[shape][number] * 1e3,
                "step": self._steps_s[shape][number] * 1e3,
            }
            for shape in self._shapes
        }

    def step(self, shape: PromptShape, limits: Limits) -> Times:
        prepared, context = self.loaded.prepared, shape.tokens + self._steps // 2
        reading_s = decode_step_bytes(prepared, shape.batch, context) / limits.read_bytes_per_s
        computing_s = decode_step_flop(prepared.config, shape.batch, context) / limits.flop_per_s
        return Times(median(self._steps_s[shape]) * 1e3, max(reading_s, computing_s) * 1e3)

    def first_token(self, shape: PromptShape, limits: Limits) -> Times:
        prepared = self.loaded.prepared
        reading_s = decode_step_bytes(prepared, 0, 0) / limits.read_bytes_per_s
        computing_s = prefill_flop(prepared.config, shape.tokens) / limits.flop_per_s
        return Times(median(self._prefills_s[shape]) * 1e3, max(reading_s, computing_s) * 1e3)
