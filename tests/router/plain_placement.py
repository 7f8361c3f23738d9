"""What `router.placement.place` decides with `cache_aware`, written down without regard to speed."""

import math
from collections.abc import Sequence

from baton.process.registry.worker_record import WorkerRole
from baton.router.placement.decide import LocalPrefill, NoPrefillWorker, NoRoom, PlacementPolicy
from baton.router.placement.policies import (
    AIM_SHARE,
    BUSY_FACTOR,
    BUSY_MS,
    MAX_AFFINITY_MS,
    RECENT_LOAD_WEIGHT,
    REUSE_PREMIUM,
    SHARED_REUSE_PREMIUM,
    home_of,
)
from baton.router.placement.rates import CAUTION, MOST_ASSUMED, expected_here, token_gap_ms
from baton.router.types.placement import PlacementRequest, WorkerView
from baton.text.kv_loading import FIXED_S
from tests.router.random_clusters import has_model

Chosen = tuple[str | None, str, LocalPrefill | None, str | None]
"""(prefill, decode, why the decode worker computes the prompt, who it is fetched from)"""


def chosen(request: PlacementRequest, workers: Sequence[WorkerView], policy: PlacementPolicy) -> Chosen | NoRoom:
    suited = [worker for worker in workers if has_model(request, worker)]
    decode = [worker for worker in suited if worker.role is WorkerRole.DECODE]
    prefill = [worker for worker in suited if worker.role is WorkerRole.PREFILL]
    is_local = policy.no_prefill_worker is NoPrefillWorker.LOCAL
    if not prefill and not is_local:
        return NoRoom.NO_PREFILL_WORKER
    if not decode:
        return NoRoom.NO_DECODE_WORKER
    free = [worker for worker in decode if has_room(request, worker)]
    if not free:
        return _no_room(request, decode)
    untried = [worker for worker in prefill if worker.endpoint not in request.avoided_prefill]
    untried = [
        worker
        for worker in untried
        if any((worker.endpoint, each.endpoint) not in request.broken_pairs for each in free)
    ]
    computing = _cheapest(request, untried or prefill, _prompt_costs(request, untried or prefill))
    near = [
        worker
        for worker in free
        if computing is None or (computing.endpoint, worker.endpoint) not in request.broken_pairs
    ]
    near = [worker for worker in near if worker.endpoint == request.preferred_decode] or near or free
    answering = _cheapest(request, near, _answer_costs(request, near, computing))
    assert answering is not None
    hit_tokens = had_tokens(request, answering)
    if computing is None:
        return None, answering.endpoint, LocalPrefill.NO_PREFILL_WORKER, None
    if not untried and is_local:
        return None, answering.endpoint, LocalPrefill.PREFILL_WORKERS_FAILED, None
    soonest_ms = min(expected_here(request, worker).ttft_ms for worker in untried or prefill)
    is_in_time = is_idle(answering) or expected_here(request, answering).ttft_ms <= soonest_ms
    if hit_tokens and request.prompt_tokens - hit_tokens <= policy.local_prefill_tokens and is_in_time:
        return None, answering.endpoint, LocalPrefill.SHORT_SUFFIX, None
    limit_ms = (soonest_ms - BUSY_MS) / BUSY_FACTOR
    if soonest_ms > AIM_SHARE * request.first_token_in_ms:
        limit_ms = max(limit_ms, min(soonest_ms, request.first_token_in_ms))
    itself = _cheapest(request, free, _answer_costs(request, free, None))
    if is_local and limit_ms > 0 and itself is not None and expected_here(request, itself).ttft_ms < limit_ms:
        return None, itself.endpoint, LocalPrefill.PREFILL_WORKERS_BUSY, None
    return computing.endpoint, answering.endpoint, None, _source(request, suited, answering, computing)


def is_idle(worker: WorkerView) -> bool:
    """Whether no answer runs there or is on its way."""
    slots = worker.used_slots + worker.elsewhere_slots
    return slots + worker.tokens_in_flight + worker.pending_prompt_tokens == 0


def prompt_rate(worker: WorkerView, request: PlacementRequest) -> float:
    """Prompt tokens per second."""
    rates = worker.rates
    if worker.role is WorkerRole.PREFILL or is_idle(worker):
        return rates.prefill_tokens_per_s
    if rates.beside_tokens_per_s is not None:
        return rates.beside_tokens_per_s
    gap_ms = rates.token_gap_ms + rates.token_gap_ms_per_token * worker.tokens_in_flight
    left = 0.0 if request.tbt_slo_ms == math.inf else 1.0 - gap_ms / request.tbt_slo_ms
    return max(CAUTION, MOST_ASSUMED * left) * rates.prefill_tokens_per_s


def _source(
    request: PlacementRequest, suited: Sequence[WorkerView], decode: WorkerView, prefill: WorkerView
) -> str | None:
    others = [worker for worker in suited if worker.endpoint != prefill.endpoint]
    in_files = _source_with_files(request, others, prefill)
    if in_files is not None:
        return in_files
    most = max(request.ready_tokens(worker) for worker in others)
    best = [worker.endpoint for worker in others if request.ready_tokens(worker) == most]
    if most <= request.hit_tokens(prefill):
        return None
    return decode.endpoint if decode.endpoint in best else best[0]


def _source_with_files(request: PlacementRequest, others: Sequence[WorkerView], prefill: WorkerView) -> str | None:
    had, in_pools = had_tokens(request, prefill), max(request.ready_tokens(worker) for worker in others)
    reach = {worker.endpoint: _with_files(request, worker) for worker in others}
    most = max(reach.values())
    if most <= max(had, in_pools if in_pools > request.hit_tokens(prefill) else 0):
        return None
    source = next(worker for worker in others if reach[worker.endpoint] == most)
    load_s = FIXED_S + (most - request.hit_tokens(source)) / request.block_tokens * _load_s_per_block(source)
    gb_per_s = prefill.rates.links_gb_per_s.get(source.endpoint, prefill.rates.link_gb_per_s)
    fetched_bytes = (most - request.hit_tokens(prefill)) / request.block_tokens * source.tier_block_bytes
    compute_s = (most - had) / prefill.rates.prefill_tokens_per_s
    return source.endpoint if load_s + fetched_bytes / (1e9 * gb_per_s) < compute_s else None


def _with_files(request: PlacementRequest, worker: WorkerView) -> int:
    """Tokens of the prompt that it could give, some of them from files; 0 where it needs none of those."""
    blocks = min(worker.hit_blocks + worker.tier_blocks, request.reusable_blocks)
    has_all_of_its_hits = worker.ready_blocks >= worker.hit_blocks
    return blocks * request.block_tokens if has_all_of_its_hits and blocks > worker.hit_blocks else 0


def _load_s_per_block(worker: WorkerView) -> float:
    return worker.tier_block_bytes / (worker.load_bytes_per_s or 1e9)


def loaded(request: PlacementRequest, worker: WorkerView) -> tuple[int, float]:
    """(tokens, milliseconds): what the worker loads from files, which it does where that is sooner than computing."""
    hit_blocks = min(worker.hit_blocks, request.reusable_blocks)
    blocks = min(worker.tier_blocks, request.reusable_blocks - hit_blocks)
    load_s = FIXED_S + blocks * _load_s_per_block(worker)
    tokens = blocks * request.block_tokens
    return (tokens, 1e3 * load_s) if blocks and load_s < tokens / worker.rates.prefill_tokens_per_s else (0, 0.0)


def exposed_load_ms(request: PlacementRequest, worker: WorkerView, wait_ms: float) -> float:
    tokens, load_ms = loaded(request, worker)
    return max(0.0, worker.loading_ms + load_ms - wait_ms) if tokens else 0.0


def had_tokens(request: PlacementRequest, worker: WorkerView) -> int:
    return request.hit_tokens(worker) + loaded(request, worker)[0]


def has_room(request: PlacementRequest, worker: WorkerView) -> bool:
    fits = request.longest_blocks <= worker.total_blocks and request.choices <= worker.total_slots
    alone = worker.used_blocks == 0 and worker.limit_blocks >= worker.total_blocks
    has_blocks = worker.used_blocks + request.charged_blocks <= worker.limit_blocks or alone
    return fits and has_blocks and worker.used_slots + request.choices <= worker.limit_slots


def _no_room(request: PlacementRequest, decode: Sequence[WorkerView]) -> NoRoom:
    wide = [worker for worker in decode if request.choices <= worker.total_slots]
    if not wide:
        return NoRoom.TOO_MANY_CHOICES
    is_long = all(request.longest_blocks > worker.total_blocks for worker in wide)
    return NoRoom.TOO_LONG if is_long else NoRoom.NO_CREDIT


def _cheapest(request: PlacementRequest, workers: Sequence[WorkerView], costs: Sequence[float]) -> WorkerView | None:
    best = [worker for worker, cost in zip(workers, costs, strict=True) if cost == min(costs)]
    return best[request.turn % len(best)] if best else None


def _homes(request: PlacementRequest, workers: Sequence[WorkerView]) -> list[int]:
    home = home_of((request.session or "").encode(), workers)
    return [int(worker is not home and request.session is not None) for worker in workers]


def _prompt_costs(request: PlacementRequest, workers: Sequence[WorkerView]) -> list[float]:
    if not workers:
        return []
    furthest = max(workers, key=lambda worker: worker.hit_blocks + worker.tier_blocks)
    keep = max(SHARED_REUSE_PREMIUM, REUSE_PREMIUM / (1 + furthest.branches)) - 1.0
    best_tokens = max(had_tokens(request, worker) for worker in workers)
    longest_ms = MAX_AFFINITY_MS + min(expected_here(request, worker).wait_ms for worker in workers)
    costs = []
    for worker, home in zip(workers, _homes(request, workers), strict=True):
        pace, hit_tokens = 1e3 / prompt_rate(worker, request), had_tokens(request, worker)
        is_prefill = worker.role is WorkerRole.PREFILL
        waiting = worker.tokens_in_flight if is_prefill else worker.pending_prompt_tokens
        cost = (
            waiting * pace
            + (request.prompt_tokens - hit_tokens) * pace
            + RECENT_LOAD_WEIGHT * worker.recent_tokens * pace
        )
        cost += exposed_load_ms(request, worker, waiting * pace)
        if request.session is None:
            costs.append(cost + min(keep * (best_tokens - hit_tokens) * pace, longest_ms))
        else:
            costs.append(cost + longest_ms * home)
    return costs


def _answer_costs(request: PlacementRequest, workers: Sequence[WorkerView], prefill: WorkerView | None) -> list[float]:
    answers = [request.charged_answer_tokens * token_gap_ms(request, worker) for worker in workers]
    if prefill is None:
        return [prompt + answer for prompt, answer in zip(_prompt_costs(request, workers), answers, strict=True)]
    expected = expected_here(request, prefill)
    return [
        expected.ttft_ms
        + max(0.0, transfer_ms(request, worker, prefill) - expected.compute_ms)
        + answer_ms
        + MAX_AFFINITY_MS * home
        for worker, answer_ms, home in zip(workers, answers, _homes(request, workers), strict=True)
    ]


def transfer_ms(request: PlacementRequest, decode: WorkerView, prefill: WorkerView) -> float:
    """Of the part of the prompt's KV that the decode worker lacks, over the link between the two."""
    rates = decode.rates
    gb_per_s = rates.links_gb_per_s.get(prefill.endpoint, rates.link_gb_per_s)
    missing_tokens = request.prompt_tokens - request.hit_tokens(decode)
    return missing_tokens * rates.kv_bytes_per_token / (1e6 * gb_per_s)
