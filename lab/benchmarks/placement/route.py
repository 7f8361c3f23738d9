"""Command `baton bench route`: compares the router's placement with other routers' policies on simulated workers.

Reports cache hits, balance, time to first token, and the CPU time of a decision.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console

from baton.lab.benchmarks.placement.files import FileOptions
from baton.lab.benchmarks.placement.policies import BASELINES, PlacedByRouter
from baton.lab.benchmarks.placement.simulation import (
    Chooser,
    PlacementRun,
    PlacementSimulation,
    SimulatedPrompt,
    SimulatedWorkers,
    Speeds,
    pooled_hit_rate,
)
from baton.lab.benchmarks.placement.traces import TraceArrival, from_zero, make_trace, read_trace, total_blocks
from baton.lab.commands.bench_options import FilesSeen, RouteOptions
from baton.lab.report.picture import Axis, BarChart, Bars, draw_bars
from baton.lab.report.result import Columns, ResultForm, show, write_pictures
from baton.lab.report.statistics import percentile
from baton.router.placement.policies import Strategy

MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class HitBounds:
    pooled_lru: float
    infinite: float


@dataclass(frozen=True, slots=True)
class Imbalance:
    """Load of the busiest worker over the mean of all, in prompt tokens, per minute and over the complete trace."""

    p50: float
    p95: float
    whole: float


@dataclass(frozen=True, slots=True)
class RouteFigures:
    """Figures of one policy; hit and load rates are fractions of blocks.

    `imbalance_*` counts a prompt's tokens in the minute in which it was sent to its worker, `computed_imbalance_*` in
    the minutes in which they were computed: queues even out the computed load.
    """

    policy: str
    hit_rate: float
    loaded_rate: float  # blocks loaded from files
    pooled_lru_bound: float
    infinite_bound: float
    of_pooled_lru: float | None  # hit rate over pooled_lru_bound; None if the bound is 0
    of_infinite: float | None
    imbalance_1min_p50: float
    imbalance_1min_p95: float
    imbalance_whole: float
    computed_imbalance_1min_p95: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    token_gap_p99_ms: float
    decision_us_p50: float
    decision_us_p99: float
    computed_tokens: int
    mispredicted: float  # fraction of prompts whose hits differed from those expected at dispatch
    requests: int
    workers: int


def bounds_of(arrivals: Sequence[TraceArrival], workers: int, blocks_per_worker: int) -> HitBounds:
    return HitBounds(pooled_hit_rate(arrivals, workers * blocks_per_worker), pooled_hit_rate(arrivals, None))


def figures_of(policy: str, run: PlacementRun, bounds: HitBounds, workers: int) -> RouteFigures:
    prompts = run.prompts
    blocks = total_blocks([prompt.arrival for prompt in prompts])
    hit_rate = sum(prompt.hit_blocks for prompt in prompts) / blocks if blocks else 0.0
    loaded_rate = sum(prompt.loaded_blocks for prompt in prompts) / blocks if blocks else 0.0
    ttft_ms = sorted(1e3 * (prompt.first_token_s - prompt.arrival.at_s) for prompt in prompts)
    given, computed = imbalance_of_given(prompts, workers), imbalance_of_computed(prompts, workers)
    return RouteFigures(
        policy=policy,
        hit_rate=round(hit_rate, 5),
        loaded_rate=round(loaded_rate, 5),
        pooled_lru_bound=round(bounds.pooled_lru, 5),
        infinite_bound=round(bounds.infinite, 5),
        of_pooled_lru=round(hit_rate / bounds.pooled_lru, 4) if bounds.pooled_lru else None,
        of_infinite=round(hit_rate / bounds.infinite, 4) if bounds.infinite else None,
        imbalance_1min_p50=round(given.p50, 3),
        imbalance_1min_p95=round(given.p95, 3),
        imbalance_whole=round(given.whole, 3),
        computed_imbalance_1min_p95=round(computed.p95, 3),
        ttft_mean_ms=round(sum(ttft_ms) / len(ttft_ms), 1),
        ttft_p50_ms=round(percentile(ttft_ms, 50), 1),
        ttft_p90_ms=round(percentile(ttft_ms, 90), 1),
        ttft_p99_ms=round(percentile(ttft_ms, 99), 1),
        token_gap_p99_ms=round(percentile(run.token_gaps_ms, 99), 2),
        decision_us_p50=round(percentile(run.decisions_us, 50), 1),
        decision_us_p99=round(percentile(run.decisions_us, 99), 1),
        computed_tokens=sum(prompt.computed_tokens for prompt in prompts),
        mispredicted=round(run.mispredicted / len(prompts), 4),
        requests=len(prompts),
        workers=workers,
    )


def imbalance_of_given(prompts: Sequence[SimulatedPrompt], workers: int) -> Imbalance:
    by_minute = _no_tokens(workers)
    for prompt in prompts:
        by_minute[int(prompt.arrival.at_s // MINUTE_S)][prompt.prefill] += prompt.computed_tokens
    return _imbalance(list(by_minute.values()))


def imbalance_of_computed(prompts: Sequence[SimulatedPrompt], workers: int) -> Imbalance:
    by_minute = _no_tokens(workers)
    for prompt in prompts:
        begin_s, end_s = prompt.started_s, prompt.first_token_s
        per_s = prompt.computed_tokens / (end_s - begin_s)
        for minute in range(int(begin_s // MINUTE_S), int(end_s // MINUTE_S) + 1):
            inside_s = min(end_s, (minute + 1) * MINUTE_S) - max(begin_s, minute * MINUTE_S)
            by_minute[minute][prompt.prefill] += per_s * inside_s
    return _imbalance(list(by_minute.values()))


def _no_tokens(workers: int) -> defaultdict[int, list[float]]:
    return defaultdict(lambda: [0.0] * workers)


def _imbalance(minutes: Sequence[Sequence[float]]) -> Imbalance:
    ratios = [max(tokens) * len(tokens) / sum(tokens) for tokens in minutes if sum(tokens)]
    whole = [sum(of_worker) for of_worker in zip(*minutes, strict=True)]
    return Imbalance(percentile(ratios, 50), percentile(ratios, 95), max(whole) * len(whole) / sum(whole))


COLUMNS: Columns[RouteFigures] = {
    "policy": lambda each: each.policy,
    "hit rate": lambda each: f"{each.hit_rate:.4f}",
    "from files": lambda each: f"{each.loaded_rate:.4f}",
    "of pooled LRU": lambda each: "-" if each.of_pooled_lru is None else f"{each.of_pooled_lru:.4f}",
    "imbalance by minute p50": lambda each: f"{each.imbalance_1min_p50:.2f}",
    "imbalance p95": lambda each: f"{each.imbalance_1min_p95:.2f}",
    "TTFT mean ms": lambda each: f"{each.ttft_mean_ms:,.0f}",
    "TTFT p50": lambda each: f"{each.ttft_p50_ms:,.0f}",
    "TTFT p99": lambda each: f"{each.ttft_p99_ms:,.0f}",
    "decision p50 us": lambda each: f"{each.decision_us_p50:.0f}",
    "decision p99": lambda each: f"{each.decision_us_p99:.0f}",
}


def note_of(figures: Sequence[RouteFigures]) -> str:
    first = figures[0]
    return (
        f"{first.requests:,} prompts, {first.workers} workers; a single LRU cache of their total size would hit "
        f"{first.pooled_lru_bound:.2%} of blocks, an unbounded one {first.infinite_bound:.2%}"
    )


def pictures(figures: Sequence[RouteFigures], trace: str) -> dict[str, str]:
    """Return SVG pictures by name: hits next to the bound, balance, and time to first token."""
    names = tuple(each.policy.replace("_", " ") for each in figures)

    def bars(title: str, axis: Axis, values: Sequence[float], mark: float | None = None) -> str:
        return draw_bars(BarChart(f"{title}: {trace}", axis, names, (Bars("", tuple(values)),), mark))

    hits = [100 * each.hit_rate for each in figures]
    return {
        "route-hits": bars("Blocks found in the cache", Axis("percent"), hits, 100 * figures[0].pooled_lru_bound),
        "route-imbalance": bars(
            "Busiest worker over the mean, by minute, p95", Axis("ratio"), [e.imbalance_1min_p95 for e in figures], 1.0
        ),
        "route-ttft": bars("Mean time to first token", Axis("ms", is_log=True), [e.ttft_mean_ms for e in figures]),
    }


POLICIES: tuple[str, ...] = (*(strategy.value for strategy in Strategy), *BASELINES)


def policies_of(options: RouteOptions) -> Sequence[str]:
    return POLICIES if options.policy == "all" else options.policy.split(",")


def run_route(options: RouteOptions) -> int:
    """Run the policies and print their figures: a table, or JSON by policy. Raises: CommandFailed."""
    figures = simulate_all(load_arrivals(options), options, Console(stderr=True, highlight=False).print)
    name = options.trace.stem if options.trace is not None else options.shape
    write_pictures(options.pictures, pictures(figures, name))
    measures = ("router/placement", "router/cache", "lab/benchmarks/placement")
    show(figures, options.json, ResultForm(COLUMNS, lambda each: each.policy, measures), note_of(figures))
    return 0


def load_arrivals(options: RouteOptions) -> list[TraceArrival]:
    """Read or generate the trace. Raises: CommandFailed."""
    arrivals = read_trace(options.trace) if options.trace is not None else make_trace(options.shape, options.seed)
    return from_zero(arrivals, options.speed)


def simulate_all(
    arrivals: Sequence[TraceArrival], options: RouteOptions, note: Callable[[str], None]
) -> list[RouteFigures]:
    bounds, files, figures = bounds_of(arrivals, options.workers, options.blocks_per_worker), None, []
    speeds = Speeds(prefill_tokens_per_s=options.prefill_tokens_per_s, token_gap_ms=options.token_gap_ms)
    if options.files is not FilesSeen.NONE:
        known = options.files is FilesSeen.KNOWN
        files = FileOptions(options.file_blocks, options.workers_per_directory, options.file_gb_per_s, known)
    for policy in policies_of(options):
        world = SimulatedWorkers.of(options.workers, options.blocks_per_worker, speeds, files)
        run = PlacementSimulation(world, make_chooser(policy, options.workers)).run(arrivals)
        figures.append(figures_of(policy, run, bounds, options.workers))
        note(f"{policy}: hit rate {figures[-1].hit_rate:.3f}, {figures[-1].ttft_mean_ms:,.0f} ms to first token")
    return figures


def make_chooser(policy: str, workers: int) -> Chooser:
    """Create the chooser of a policy. Raises: KeyError for an unknown policy."""
    return BASELINES[policy]() if policy in BASELINES else PlacedByRouter(Strategy(policy), workers)
