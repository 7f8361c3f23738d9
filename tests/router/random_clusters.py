"""Requests and workers of few kinds, so that ties, exhausted credit, short suffixes and set-aside pairs come up."""

import math
from dataclasses import replace
from random import Random

from baton.process.registry.worker_record import WorkerRole
from baton.router.types.placement import PlacementRequest, WorkerRates, WorkerView

F, OTHER = b"f" * 32, b"g" * 32


def random_worker(chance: Random, number: int) -> WorkerView:
    worker = _without_files(chance, number)
    files = Random(f"{worker.recent_tokens} {worker.branches} {worker.hit_blocks}").choice
    return replace(
        worker,
        tier_blocks=files([0, 0, 0, 20, 90]),
        tier_block_bytes=files([3_000, 3_000_000]),
        load_bytes_per_s=files([0.0, 1e7, 1e9]),
        loading_ms=files([0.0, 0.0, 2000.0]),
    )


def _without_files(chance: Random, number: int) -> WorkerView:
    pick = chance.choice
    total_blocks = pick([1000, 1000, 60, 14])
    return WorkerView(
        endpoint=str(number),
        role=pick(list(WorkerRole)),
        fingerprint=pick([F] * 15 + [OTHER]),
        total_blocks=total_blocks,
        total_slots=pick([1, 8, 8]),
        limit_blocks=min(total_blocks, pick([500, 500, 200, 0])),
        limit_slots=pick([1, 8]),
        used_blocks=pick([0, 0, 100, 400]),
        used_slots=pick([0, 0, 2]),
        tokens_in_flight=pick([0, 1000, 50_000]),
        hit_blocks=pick([0, 10, 30, 120]),
        ready_blocks=pick([0, 10, 30, 120]),
        pending_prompt_tokens=pick([0, 1000, 50_000]),
        recent_tokens=pick([0.0, 1234.5, 1e5]),
        rates=WorkerRates(
            prefill_tokens_per_s=pick([1000.0, 10_000.0]),
            beside_tokens_per_s=pick([None, 50.0, 2000.0]),
            token_gap_ms=pick([5.0, 20.0]),
            links_gb_per_s={str(chance.randrange(8)): pick([0.001, 1.0])},
        ),
        branches=chance.randrange(20),
    )


def random_request(chance: Random) -> PlacementRequest:
    pick = chance.choice
    some = [str(chance.randrange(12)) for _ in range(8)]
    return PlacementRequest(
        fingerprint=F,
        block_tokens=32,
        prompt_tokens=pick([1, 320, 321, 961, 3500]),
        max_tokens=pick([1, 100, 500]),
        choices=pick([1, 1, 2]),
        turn=chance.randrange(1000),
        avoided_prefill=frozenset(some[: pick([0, 0, 2, 8])]),
        broken_pairs=frozenset((a, b) for a in some for b in some) if chance.random() < 0.3 else frozenset(),
        preferred_decode=pick([None, None, some[0]]),
        prefix=pick([b"", b"one", b"two"]),
        session=pick([None, None, "one", "two"]),
        first_token_in_ms=pick([math.inf, 2000.0, 20_000.0, -5.0]),
        tbt_slo_ms=pick([math.inf, 50.0, 10.0]),
    )


def has_model(request: PlacementRequest, worker: WorkerView) -> bool:
    has_weights = worker.has_own_weights if request.adapter is None else request.adapter in worker.adapters
    return worker.fingerprint == request.fingerprint and has_weights
