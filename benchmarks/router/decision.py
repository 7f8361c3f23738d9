"""The time of choosing the workers of one request: snapshot of the cluster, placement, charge; hashing apart.

All of it in this process, with the very code of the router.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, TypeVarTuple

from baton.benchmarks.report.statistics import percentile
from baton.benchmarks.router.worker import BLOCK_TOKENS, BLOCKS, CONTEXT_TOKENS, SLOTS, VOCABULARY
from baton.generation.block_hash import block_hashes
from baton.router.placement.cluster import Cluster
from baton.router.placement.decide import Placement, PlacementPolicy, Strategy, place
from baton.router.placement.views import PlacementRequest
from baton.router.types.worker import ModelDescription, PageCounts, WorkerDescription, WorkerReport
from baton.service.registry.worker_record import WorkerRole

FINGERPRINT = bytes(32)
CONVERSATIONS = 64
WARM_UP = 50
POLICY = PlacementPolicy(strategy=Strategy.CACHE_AWARE)

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True, slots=True)
class DecisionFigures:
    """Microseconds per request."""

    workers: int
    prompt_tokens: int
    decision_p50_us: float
    decision_p99_us: float
    charge_p50_us: float
    hashing_p50_us: float
    hashing_p99_us: float


def measure_decision(workers: int, prompt_tokens: int, rounds: int, seed: int = 0) -> DecisionFigures:
    """Half of the workers prefill, half decode. Prompts share their beginnings with earlier ones, as turns do."""
    chance = random.Random(seed)
    cluster = _cluster(workers)
    turns = _turns(chance, prompt_tokens)
    decisions, charges, hashings = [], [], []
    for number in range(1, WARM_UP + rounds + 1):
        token_ids = turns()
        hashing_us, hashes = _timed(block_hashes, FINGERPRINT, token_ids, BLOCK_TOKENS)
        request = PlacementRequest(FINGERPRINT, BLOCK_TOKENS, prompt_tokens, 256, 1, turn=number)
        decision_us, placement = _timed(_decide, cluster, request, hashes)
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


def _decide(cluster: Cluster, request: PlacementRequest, hashes: tuple[bytes, ...]) -> Placement:
    """As the router's queue does for a request that finds it empty."""
    placement = place(request, cluster.snapshot(hashes, request.turn), POLICY)
    if not isinstance(placement, Placement):
        raise RuntimeError(f"an idle cluster has room, and not {placement}")
    return placement


def _turns(chance: random.Random, prompt_tokens: int) -> Callable[[], tuple[int, ...]]:
    """Makes prompts that each share half or more with an earlier one."""
    beginnings = [[chance.randrange(VOCABULARY) for _ in range(prompt_tokens)] for _ in range(CONVERSATIONS)]

    def turn() -> tuple[int, ...]:
        kept = chance.randrange(prompt_tokens // 2, prompt_tokens)
        rest = [chance.randrange(VOCABULARY) for _ in range(prompt_tokens - kept)]
        return (*chance.choice(beginnings)[:kept], *rest)

    return turn


def _cluster(workers: int) -> Cluster:
    cluster = Cluster()
    model = ModelDescription("zero", "", CONTEXT_TOKENS, VOCABULARY, "float32", BLOCK_TOKENS)
    report = WorkerReport(BLOCKS, SLOTS, PageCounts(BLOCKS, BLOCKS, 0, 0, 0, 0), 0, 0, 0, False, 0)
    for index in range(workers):
        role = WorkerRole.PREFILL if index % 2 else WorkerRole.DECODE
        endpoint = f"127.0.0.1:{50000 + index}"
        cluster.add(endpoint, role)
        cluster.connected(endpoint, WorkerDescription(endpoint, role, 1, FINGERPRINT, model, BLOCKS, SLOTS), epoch=1)
        cluster.reported(endpoint, report)
    return cluster


def _timed(work: Callable[[*Arguments], Result], *arguments: *Arguments) -> tuple[float, Result]:
    """(microseconds, result)"""
    began = time.perf_counter_ns()
    result = work(*arguments)
    return (time.perf_counter_ns() - began) / 1e3, result
