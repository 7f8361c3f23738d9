"""What does a placement gain from knowing what lies in workers' files? `baton bench route` on all shapes, side by side.

    .venv/bin/python -m baton.lab.benchmarks.placement.with_files [--shapes chat,tenants] [--json FILE]

8 workers, 4 to a directory. A worker's files have room for an eighth of the trace's different blocks, its cache for a
`cache_shares`-th of that. `none`: without files; `unknown`: workers load, and placements count on pools alone; `known`.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum, auto

from baton.lab.benchmarks.placement.files import FileOptions
from baton.lab.benchmarks.placement.route import RouteFigures, bounds_of, figures_of, make_chooser
from baton.lab.benchmarks.placement.simulation import Simulation, Speeds, World
from baton.lab.benchmarks.placement.traces import Arrival, make_trace
from baton.lab.benchmarks.report.result import Columns, read_arguments, table, write_result

WORKERS, WORKERS_PER_DIRECTORY = 8, 4
POLICY = "cache_aware"


class Files(StrEnum):
    NONE = auto()
    UNKNOWN = auto()
    KNOWN = auto()


@dataclass(frozen=True)
class Point:
    shape: str
    prefill_tokens_per_s: float
    different_blocks: int
    blocks_per_worker: int  # of the caches
    files: Files
    load_gb_per_s: float
    figures: RouteFigures


def measure(
    shape: str, arrivals: Sequence[Arrival], speeds: Speeds, cache_share: int, load_gb_per_s: float
) -> list[Point]:
    different = len({block for arrival in arrivals for block in arrival.blocks})
    file_blocks = max(1, different // WORKERS)
    cache_blocks = max(1, file_blocks // cache_share)
    bounds = bounds_of(arrivals, WORKERS, cache_blocks)
    points = []
    for files in Files:
        below = FileOptions(file_blocks, WORKERS_PER_DIRECTORY, load_gb_per_s, known=files is Files.KNOWN)
        world = World.of(WORKERS, cache_blocks, speeds, None if files is Files.NONE else below)
        run = Simulation(world, make_chooser(POLICY, WORKERS)).run(arrivals)
        figures = figures_of(POLICY, run, bounds, WORKERS)
        rate = speeds.prefill_tokens_per_s
        points.append(Point(shape, rate, different, cache_blocks, files, load_gb_per_s, figures))
    return points


COLUMNS: Columns[Point] = {
    "shape": lambda point: point.shape,
    "tokens/s": lambda point: f"{point.prefill_tokens_per_s:,.0f}",
    "cache blocks": lambda point: point.blocks_per_worker,
    "files": lambda point: point.files,
    "in a cache": lambda point: f"{point.figures.hit_rate:.3f}",
    "from files": lambda point: f"{point.figures.loaded_rate:.3f}",
    "TTFT mean ms": lambda point: f"{point.figures.ttft_mean_ms:,.0f}",
    "TTFT p99": lambda point: f"{point.figures.ttft_p99_ms:,.0f}",
    "imbalance p95": lambda point: f"{point.figures.imbalance_1min_p95:.2f}",
    "mispredicted": lambda point: f"{point.figures.mispredicted:.3f}",
}


def main() -> None:
    options = read_arguments(
        __doc__,
        shapes="chat,agents,documents,tenants",
        cache_shares="20,5",
        tokens_per_s="20000,8000",
        file_gb_per_s=6.0,
    )
    points: list[Point] = []
    for shape in options.shapes.split(","):
        arrivals = make_trace(shape)
        for rate in map(float, options.tokens_per_s.split(",")):
            for share in map(int, options.cache_shares.split(",")):
                points += measure(shape, arrivals, Speeds(rate), share, options.file_gb_per_s)
        print(table(points, COLUMNS), flush=True)
    write_result(options.json, {"points": [asdict(point) for point in points]})


if __name__ == "__main__":
    main()
