"""CPU time of choosing the workers of one request, measured in this process with the router's code.

`baton bench router` measures a typical request: cluster snapshot, placement, recording of its load, and hashing.
`baton bench route --scaled` measures each part for up to 1,000 workers and long prompts. Its prompts are turns of
conversations that share a few system prompts; a conversation is cached on one worker, a system prompt on many.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from baton.lab.report.picture import Axis, DrawnCurve, LineChart, draw_lines
from baton.lab.report.result import Columns, ResultForm, show, write_pictures
from baton.lab.report.statistics import percentile
from baton.process.registry.worker_record import WorkerRole
from baton.router.placement.cluster import Cluster
from baton.router.placement.decide import NoPrefillWorker, Placement, PlacementPolicy, place
from baton.router.placement.policies import Strategy
from baton.router.types.placement import PlacementRequest
from baton.router.types.worker import ModelDescription, PoolBlocks, WorkerDescription, WorkerReport
from baton.text.block_hash import block_hashes

BLOCK_TOKENS = 32
FINGERPRINT = bytes(32)
ROOM = 1 << 40
POLICY = PlacementPolicy(NoPrefillWorker.QUEUE, 0, Strategy.CACHE_AWARE)

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


def cluster_of(roles: Mapping[str, WorkerRole]) -> Cluster:
    """Return a cluster of idle workers that are never full, as the router sees it."""
    cluster = Cluster()
    model = ModelDescription("zero", "", ROOM, 1000, "float32", BLOCK_TOKENS)
    for endpoint, role in roles.items():
        slots = ROOM if role is WorkerRole.DECODE else 0
        cluster.add(endpoint, role)
        cluster.connected(endpoint, WorkerDescription(endpoint, role, 1, FINGERPRINT, model, ROOM, slots), epoch=1)
        report = WorkerReport(ROOM, slots, PoolBlocks(ROOM, ROOM, 0, 0, 0, 0), 0, 0, 0, False, 0)
        cluster.reported(endpoint, report)
    return cluster


def half_of_each(workers: int) -> dict[str, WorkerRole]:
    return {f"w{number}": WorkerRole.PREFILL if number % 2 else WorkerRole.DECODE for number in range(workers)}


def decide(cluster: Cluster, request: PlacementRequest, hashes: Sequence[bytes]) -> Placement:
    """Decide as the router does for a request that does not have to queue."""
    placement = place(request, cluster.snapshot(hashes, request.turn), POLICY)
    if not isinstance(placement, Placement):
        raise RuntimeError(f"no worker of the cluster is full, but placement failed: {placement}")
    return placement


CONVERSATIONS = 64
VOCABULARY = 259
WARM_UP = 50


@dataclass(frozen=True, slots=True)
class DecisionFigures:
    """Microseconds per request of choosing workers, of charging the load to them, and of hashing the prompt."""

    workers: int
    prompt_tokens: int
    decision_p50_us: float
    decision_p99_us: float
    charge_p50_us: float
    hashing_p50_us: float
    hashing_p99_us: float


def measure_decision(workers: int, prompt_tokens: int, rounds: int, seed: int = 0) -> DecisionFigures:
    """Measure decisions for prompts that share prefixes with earlier ones. Half of the workers are prefill workers."""
    chance = random.Random(seed)
    cluster = cluster_of(half_of_each(workers))
    turns = _turns(chance, prompt_tokens)
    decisions, charges, hashings = [], [], []
    for number in range(1, WARM_UP + rounds + 1):
        token_ids = turns()
        hashing_us, hashes = _timed(block_hashes, FINGERPRINT, token_ids, BLOCK_TOKENS)
        request = PlacementRequest(FINGERPRINT, BLOCK_TOKENS, prompt_tokens, 256, 1, turn=number)
        decision_us, placement = _timed(decide, cluster, request, hashes)
        charge_us, _ = _timed(cluster.charge, number, placement, request, hashes)
        for endpoint in placement.endpoints:
            cluster.release(number, endpoint)
        if number > WARM_UP:
            decisions.append(decision_us)
            charges.append(charge_us)
            hashings.append(hashing_us)
    return DecisionFigures(
        workers, prompt_tokens, percentile(decisions, 50), percentile(decisions, 99), percentile(charges, 50),
        percentile(hashings, 50), percentile(hashings, 99),
    )  # fmt: skip


def _turns(chance: random.Random, prompt_tokens: int) -> Callable[[], tuple[int, ...]]:
    """Return a function that makes prompts, each of which shares at least half of its tokens with an earlier one."""
    beginnings = [[chance.randrange(VOCABULARY) for _ in range(prompt_tokens)] for _ in range(CONVERSATIONS)]

    def turn() -> tuple[int, ...]:
        kept = chance.randrange(prompt_tokens // 2, prompt_tokens)
        rest = [chance.randrange(VOCABULARY) for _ in range(prompt_tokens - kept)]
        return (*chance.choice(beginnings)[:kept], *rest)

    return turn


def _timed(work: Callable[[*Arguments], Result], *arguments: *Arguments) -> tuple[float, Result]:
    """Return the microseconds that a call took, and its result."""
    began = time.perf_counter_ns()
    result = work(*arguments)
    return (time.perf_counter_ns() - began) / 1e3, result


SYSTEM_TOKENS = 2048
SYSTEMS, SCALED_CONVERSATIONS = 4, 100
TARGET_PER_S = 10_000
WORKERS = (8, 16, 64, 250, 1000)
PROMPT_TOKENS = (1024, 8192, 32_768, 131_072)
USUAL_WORKERS, USUAL_TOKENS = 16, 8192
RUNNING = 500
MEASURES = ("router/placement", "router/cache", "lab/benchmarks/router")


@dataclass(frozen=True, slots=True)
class Cost:
    """Median microseconds of the parts of one decision."""

    workers: int  # number of prefill workers; there are as many decode workers
    prompt_tokens: int
    walk_us: float  # lookup in the prefix index, for all workers
    views_us: float  # snapshot of the candidates with their loads and rates, without the lookup
    place_us: float
    charge_us: float  # the request's load on the chosen workers, and the blocks that it will leave in their caches
    total_us: float
    total_p99_us: float
    candidates: float  # mean number of candidates
    decisions_per_s: float  # decisions of one process, at the median time


class _World:
    """Cluster as the router sees it, and the prompts that are sent to it."""

    def __init__(self, workers: int, prompt_tokens: int, seed: int = 0) -> None:
        self._draw = random.Random(seed)
        self.prompt_tokens = prompt_tokens
        self._prefill = [f"p{number}" for number in range(workers)]
        decode = [f"d{number}" for number in range(workers)]
        roles = dict.fromkeys(self._prefill, WorkerRole.PREFILL) | dict.fromkeys(decode, WorkerRole.DECODE)
        self.cluster = cluster_of(roles)
        self.running: deque[tuple[int, tuple[str, ...]]] = deque()  # attempt and its workers' endpoints
        self._systems = [self._system(number) for number in range(SYSTEMS)]
        self.prompts = [self._conversation() for _ in range(SCALED_CONVERSATIONS)]

    def _system(self, number: int) -> list[bytes]:
        """Return the blocks of a system prompt; a quarter of all prefill workers have them cached."""
        shared = min(SYSTEM_TOKENS, self.prompt_tokens // 2) // BLOCK_TOKENS
        blocks = [b"%08d%024d" % (number, place) for place in range(shared)]
        for worker in self._draw.sample(self._prefill, max(1, len(self._prefill) // 4)):
            self.cluster.caches.assume(worker, blocks, ROOM)
        return blocks

    def _conversation(self) -> tuple[bytes, ...]:
        """Return the blocks of a conversation; all but the last few are cached on one worker."""
        system = self._draw.choice(self._systems)
        own = [self._draw.randbytes(32) for _ in range(self.prompt_tokens // BLOCK_TOKENS - len(system))]
        self.cluster.caches.assume(self._draw.choice(self._prefill), [*system, *own[:-4]], ROOM)
        return (*system, *own)


def run_scaled(folder: Path | None, as_json: bool, decisions: int = 1000) -> int:
    costs = [measure(workers, USUAL_TOKENS, decisions) for workers in WORKERS]
    costs += [measure(USUAL_WORKERS, tokens, decisions) for tokens in PROMPT_TOKENS if tokens != USUAL_TOKENS]
    costs.append(measure(WORKERS[-1], PROMPT_TOKENS[-1], decisions))
    write_pictures(folder, {"route-decision": as_picture(costs)})
    named = ResultForm(COLUMNS, lambda cost: f"{cost.workers} workers, {cost.prompt_tokens} tokens", MEASURES)
    show(costs, as_json, named, note(costs))
    return 0


def measure(workers: int, prompt_tokens: int, decisions: int) -> Cost:
    """Measure decisions while the last RUNNING requests are in flight."""
    world = _World(workers, prompt_tokens)
    measured = [_decide_in_parts(world, turn) for turn in range(decisions)]
    walks, views, places, charges = zip(*(each.parts_us for each in measured), strict=True)
    totals = [sum(each.parts_us) for each in measured]
    return Cost(
        workers=workers,
        prompt_tokens=prompt_tokens,
        walk_us=round(percentile(walks, 50), 1),
        views_us=round(percentile(views, 50), 1),
        place_us=round(percentile(places, 50), 1),
        charge_us=round(percentile(charges, 50), 1),
        total_us=round(percentile(totals, 50), 1),
        total_p99_us=round(percentile(totals, 99), 1),
        candidates=round(sum(each.candidates for each in measured) / len(measured), 1),
        decisions_per_s=round(1e6 / percentile(totals, 50)),
    )


@dataclass(frozen=True, slots=True)
class _Timed:
    parts_us: tuple[float, float, float, float]  # in the order of the fields of Cost
    candidates: int


def _decide_in_parts(world: _World, turn: int) -> _Timed:
    cluster, blocks = world.cluster, world.prompts[turn * 7919 % SCALED_CONVERSATIONS]
    request = PlacementRequest(FINGERPRINT, BLOCK_TOKENS, world.prompt_tokens, 256, 1, turn=turn)
    began = time.perf_counter()
    cluster.caches.index.hits(blocks)
    walked = time.perf_counter()
    views = cluster.snapshot(blocks, turn)
    seen = time.perf_counter()
    placement = place(request, views, POLICY)
    placed = time.perf_counter()
    if not isinstance(placement, Placement):
        raise RuntimeError(f"no worker of the cluster is full, but placement failed: {placement}")
    cluster.charge(turn, placement, request, blocks)
    charged = time.perf_counter()
    cluster.rates.computed(placement.computing, 64, 3.0)  # as when the prompt has been computed and transferred
    cluster.rates.transferred(64, 6_400_000)
    world.running.append((turn, placement.endpoints))
    if len(world.running) > RUNNING:
        ended, endpoints = world.running.popleft()
        for endpoint in endpoints:
            cluster.release(ended, endpoint)
    walk, snapshot = walked - began, seen - walked
    parts = walk, max(0.0, snapshot - walk), placed - seen, charged - placed
    return _Timed((1e6 * parts[0], 1e6 * parts[1], 1e6 * parts[2], 1e6 * parts[3]), len(views))


COLUMNS: Columns[Cost] = {
    "workers": lambda cost: f"{cost.workers:,}",
    "prompt": lambda cost: f"{cost.prompt_tokens:,}",
    "walk": lambda cost: cost.walk_us,
    "views": lambda cost: cost.views_us,
    "place": lambda cost: cost.place_us,
    "charge": lambda cost: cost.charge_us,
    "all us": lambda cost: cost.total_us,
    "p99": lambda cost: cost.total_p99_us,
    "a second": lambda cost: f"{cost.decisions_per_s:,.0f}",
}


def note(costs: Sequence[Cost]) -> str:
    most = max(costs, key=lambda cost: cost.workers)
    processes = -(-TARGET_PER_S // most.decisions_per_s)
    return (
        f"{TARGET_PER_S:,} requests/s on {most.workers:,} workers: decisions take the CPU time of {processes:.0f} cores"
    )


def as_picture(costs: Sequence[Cost]) -> str:
    by_workers = [cost for cost in costs if cost.prompt_tokens == USUAL_TOKENS]
    parts = {
        "all": [cost.total_us for cost in by_workers],
        "views": [cost.views_us for cost in by_workers],
        "place": [cost.place_us for cost in by_workers],
        "walk": [cost.walk_us for cost in by_workers],
    }
    across = [float(cost.workers) for cost in by_workers]
    curves = tuple(DrawnCurve(name, tuple(zip(across, values, strict=True))) for name, values in parts.items())
    x = Axis("prefill workers, and as many decode workers", True, tuple(float(each) for each in WORKERS))
    title = f"One decision for {USUAL_TOKENS:,} tokens against workers"
    return draw_lines(LineChart(title, x, Axis("microseconds", True), curves))
