"""`baton bench route`: the router's placement, and other routers' policies, on a trace and simulated workers."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from baton.benchmarks.placement.policies import BASELINES, Chooser, PlacedByRouter
from baton.benchmarks.placement.report import Bounds, RouteFigures, as_table, bounds_of, figures_of, pictures
from baton.benchmarks.placement.simulation import Simulation
from baton.benchmarks.placement.traces import Arrival, from_zero, make_trace, read_trace
from baton.benchmarks.placement.world import Speeds, World
from baton.router.placement.decide import Strategy

POLICIES: tuple[str, ...] = (*(strategy.value for strategy in Strategy), *BASELINES)


@dataclass(frozen=True, slots=True)
class RouteOptions:
    trace: Path | None
    shape: str
    seed: int
    policies: tuple[str, ...]
    workers: int
    blocks_per_worker: int
    speed: float
    speeds: Speeds


def run_route(options: RouteOptions, folder: Path | None, as_json: bool) -> int:
    """One policy is printed as an object, several as a list of them. Raises: CommandFailed."""
    arrivals = load_arrivals(options)
    note = Console(stderr=True, highlight=False).print
    figures = simulate_all(arrivals, options, note)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures(figures, trace_name(options)).items():
            (folder / f"{name}.svg").write_text(picture)
    if as_json:
        objects = [asdict(each) for each in figures]
        print(json.dumps(objects[0] if len(objects) == 1 else objects))
    else:
        print(as_table(figures))
    return 0


def trace_name(options: RouteOptions) -> str:
    return options.trace.stem if options.trace is not None else options.shape


def load_arrivals(options: RouteOptions) -> list[Arrival]:
    """Raises: CommandFailed."""
    arrivals = read_trace(options.trace) if options.trace is not None else make_trace(options.shape, options.seed)
    return from_zero(arrivals, options.speed)


def simulate_all(arrivals: Sequence[Arrival], options: RouteOptions, note: Callable[[str], None]) -> list[RouteFigures]:
    bounds = bounds_of(arrivals, options.workers, options.blocks_per_worker)
    figures = []
    for policy in options.policies:
        figures.append(simulate(policy, arrivals, bounds, options))
        note(f"{policy}: hit rate {figures[-1].hit_rate:.3f}, {figures[-1].ttft_mean_ms:,.0f} ms to first token")
    return figures


def simulate(policy: str, arrivals: Sequence[Arrival], bounds: Bounds, options: RouteOptions) -> RouteFigures:
    world = World.of(options.workers, options.blocks_per_worker, options.speeds)
    run = Simulation(world, make_chooser(policy, options.workers)).run(arrivals)
    return figures_of(policy, run, bounds, options.workers)


def make_chooser(policy: str, workers: int) -> Chooser:
    """Raises: KeyError for a policy that there is not."""
    return BASELINES[policy]() if policy in BASELINES else PlacedByRouter(Strategy(policy), workers)
