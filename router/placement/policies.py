"""Placement policies, which compute the cost of each candidate worker; decide.py chooses the cheapest one. Pure."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import StrEnum, auto
from operator import add
from types import MappingProxyType
from typing import NamedTuple

from baton.router.placement.rates import expected_here, exposed_load_ms, loading, prompt_tokens_per_s, token_gap_ms
from baton.router.types.placement import PlacementRequest, WorkerView

REUSE_PREMIUM, SHARED_REUSE_PREMIUM = 40.0, 4.0
MAX_AFFINITY_MS = 10_000.0
RECENT_LOAD_WEIGHT = 0.2
AIM_SHARE = 0.25
"""Part of the time left for a first token beyond which its TTFT objective counts as at risk: waits vary."""
BUSY_FACTOR, BUSY_MS = 2.0, 1_000.0
"""A decode worker computes a prompt, although that slows its answers down, if twice its TTFT plus 1 s is less than the
TTFT of the best prefill worker.
"""


class Costs(NamedTuple):
    """Costs of workers, in the order of the workers.

    A total is the sum of a worker's terms, which `baton why` shows.
    """

    totals: Sequence[float]
    terms: Mapping[str, Sequence[float]]  # by name, which ends with the unit; absent terms are 0 for all workers


class Policy(ABC):
    """Policy that computes the workers' costs. `workers` is never empty; all costs of one call have the same unit."""

    @abstractmethod
    def prefill_costs(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> Costs:
        """Return the cost of computing the prompt at each worker."""

    def decode_costs(
        self, request: PlacementRequest, workers: Sequence[WorkerView], prefill: WorkerView | None
    ) -> Costs:
        """Return the cost of the answer at each worker.

        `prefill`: worker that computes the prompt; None: the decode worker computes it.
        """
        return self.prefill_costs(request, workers)

    def local_limit_ms(self, prefill_ms: float, first_token_in_ms: float) -> float | None:
        """Return the TTFT below which a decode worker computes the prompt itself; None: it never does.

        `prefill_ms`: TTFT of the best prefill worker, which the limit never exceeds. `first_token_in_ms`: time left for
        the first token by the request's TTFT objective.
        """
        return None


def cheapest(costs: Sequence[float], turn: int) -> int:
    """Return the index of the lowest cost. Workers of equal cost take turns."""
    least = min(costs)
    if costs.count(least) == 1:
        return costs.index(least)
    equal = [index for index, cost in enumerate(costs) if cost == least]
    return equal[turn % len(equal)]


def home_of(key: bytes, workers: Sequence[WorkerView]) -> WorkerView:
    """Return the worker to which rendezvous hashing assigns a key, independent of the order of the workers.

    If a worker leaves, only its keys move; a new worker takes an equal number of keys from each other worker (Thaler
    and Ravishankar, 1998).
    """
    return max(workers, key=lambda worker: _weight(key, worker.endpoint))


def _weight(key: bytes, endpoint: str) -> bytes:
    digest = hashlib.blake2b(key, digest_size=8)
    digest.update(endpoint.encode())
    return digest.digest()


class RoundRobin(Policy):
    def prefill_costs(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> Costs:
        turns = [(index - request.turn) % len(workers) for index in range(len(workers))]
        return Costs(turns, {"turns_away": turns})


class LeastTokens(Policy):
    def prefill_costs(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> Costs:
        in_flight = [worker.tokens_in_flight for worker in workers]
        less_cached = [-request.hit_tokens(worker) for worker in workers]
        terms = {"tokens_in_flight": in_flight, "less_cached_tokens": less_cached}
        return Costs(list(map(add, in_flight, less_cached)), terms)


class PrefixHash(Policy):
    """Policy that sends prompts with the same prefix to the same worker, whatever its cache has.

    The hash covers the first PREFIX_TOKENS, so that prompts that share only a short instruction go to different
    workers. The policy ignores load, so a popular prefix overloads its worker. Prompts shorter than a block, and
    answers, go to the worker with the fewest tokens in flight.
    """

    def __init__(self) -> None:
        self._otherwise = LeastTokens()

    def prefill_costs(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> Costs:
        if not request.prefix:
            return self._otherwise.prefill_costs(request, workers)
        home = home_of(request.prefix, workers)
        away = [int(worker is not home) for worker in workers]
        return Costs(away, {"homes_away": away})

    def decode_costs(
        self, request: PlacementRequest, workers: Sequence[WorkerView], prefill: WorkerView | None
    ) -> Costs:
        chosen_by = self if prefill is None else self._otherwise
        return chosen_by.prefill_costs(request, workers)


class CacheAware(Policy):
    """Policy whose costs are expected milliseconds, plus terms for later requests.

    By expected time alone, a conversation leaves its cached blocks whenever another worker is slightly less busy, and
    hits fall by a sixth to a third (docs/routing.md). So recomputing a token that some worker has cached costs
    REUSE_PREMIUM times its time. MAX_AFFINITY_MS bounds this premium, so that a prefix with more requests than one
    worker can serve is computed on a second worker, and then on a third. The shortest wait is added to the bound, since
    computing twice gains nothing under overload. Tokens that a worker can load from files faster than compute count as
    cached, and cost their loading time.

    Recent work is weighted by RECENT_LOAD_WEIGHT: of idle workers, the one with the least recent work is next. This
    also evens out the age of evicted blocks among workers.
    """

    def prefill_costs(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> Costs:
        paces = [1e3 / worker.rates.prefill_tokens_per_s for worker in workers]
        return _prompt_costs(request, workers, paces, [worker.tokens_in_flight for worker in workers])

    def decode_costs(
        self, request: PlacementRequest, workers: Sequence[WorkerView], prefill: WorkerView | None
    ) -> Costs:
        """Return the costs of an answer of the charged length, and of the prompt if decode workers compute it."""
        if prefill is not None:
            return _remote_costs(request, workers, prefill)
        paces = [1e3 / prompt_tokens_per_s(worker, request.tbt_slo_ms) for worker in workers]
        prompt = _prompt_costs(request, workers, paces, [worker.pending_prompt_tokens for worker in workers])
        answers = [request.charged_answer_tokens * token_gap_ms(request, worker) for worker in workers]
        return Costs(list(map(add, prompt.totals, answers)), {**prompt.terms, "answer_ms": answers})

    def local_limit_ms(self, prefill_ms: float, first_token_in_ms: float) -> float | None:
        """Return the TTFT below which a decode worker computes the prompt itself; None: it never does.

        The limit is far below `prefill_ms`, because a prompt delays the decode worker's answers. If the prefill workers
        may miss the TTFT objective, the limit is at least the smaller of `prefill_ms` and `first_token_in_ms`.
        """
        limit_ms = (prefill_ms - BUSY_MS) / BUSY_FACTOR
        if prefill_ms > AIM_SHARE * first_token_in_ms:
            limit_ms = max(limit_ms, min(prefill_ms, first_token_in_ms))
        return limit_ms if limit_ms > 0 else None


def _prompt_costs(
    request: PlacementRequest, workers: Sequence[WorkerView], paces: Sequence[float], waiting_tokens: Sequence[int]
) -> Costs:
    """Return the costs of the prompt.

    `paces`: milliseconds per token of each worker. One loop computes all terms, because this is a hot path.
    """
    prompt_tokens, reusable, block_tokens = request.prompt_tokens, request.reusable_blocks, request.block_tokens
    totals: list[float] = []
    waits, computes, balances, hits = [], [], [], []
    loads: dict[int, float] = {}  # loading time in ms that continues after the wait, by the worker's index
    for worker, pace, waiting in zip(workers, paces, waiting_tokens, strict=True):
        blocks = worker.hit_blocks
        hit_tokens = (blocks if blocks < reusable else reusable) * block_tokens
        if worker.tier_blocks:
            loaded = loading(request, worker)
            hit_tokens += loaded.blocks * block_tokens
            loads[len(totals)] = exposed_load_ms(loaded, worker, waiting * pace)
        wait_ms, compute_ms = waiting * pace, (prompt_tokens - hit_tokens) * pace
        balance_ms = RECENT_LOAD_WEIGHT * worker.recent_tokens * pace
        totals.append(wait_ms + compute_ms + balance_ms)
        waits.append(wait_ms)
        computes.append(compute_ms)
        balances.append(balance_ms)
        hits.append(hit_tokens)
    terms = {"wait_ms": waits, "compute_ms": computes, "balance_ms": balances}
    if loads:
        terms["load_ms"] = [loads.get(index, 0.0) for index in range(len(workers))]
        totals = list(map(add, totals, terms["load_ms"]))
    best_tokens = max(hits)
    if request.session is not None:
        return _with_affinity(totals, terms, _session_costs(request.session, MAX_AFFINITY_MS + min(waits), workers))
    if best_tokens == min(hits):
        return Costs(totals, terms)
    extra, longest_ms, affinities = _reuse_premium(workers) - 1.0, MAX_AFFINITY_MS + min(waits), []
    for hit_tokens, pace in zip(hits, paces, strict=True):
        again_ms = extra * (best_tokens - hit_tokens) * pace
        affinities.append(again_ms if again_ms < longest_ms else longest_ms)
    return _with_affinity(totals, terms, affinities)


def _remote_costs(request: PlacementRequest, workers: Sequence[WorkerView], prefill: WorkerView) -> Costs:
    """Return the costs at decode workers that pull the KV from `prefill`.

    One loop without calls computes all terms, because this is a hot path.
    """
    expected, source = expected_here(request, prefill), prefill.endpoint
    first_ms, hidden_ms = expected.ttft_ms, expected.compute_ms
    prompt_tokens, answer_tokens = request.prompt_tokens, request.charged_answer_tokens
    reusable, block_tokens = request.reusable_blocks, request.block_tokens
    totals, transfers, answers = [], [], []
    for worker in workers:
        rates, blocks = worker.rates, worker.hit_blocks
        missing_tokens = prompt_tokens - (blocks if blocks < reusable else reusable) * block_tokens
        bytes_per_ms = 1e6 * rates.links_gb_per_s.get(source, rates.link_gb_per_s)
        exposed_ms = missing_tokens * rates.kv_bytes_per_token / bytes_per_ms - hidden_ms
        transfer_ms = exposed_ms if exposed_ms > 0.0 else 0.0
        gap_ms = rates.token_gap_ms + rates.token_gap_ms_per_token * (worker.tokens_in_flight + prompt_tokens)
        answer_ms = answer_tokens * gap_ms
        totals.append(first_ms + transfer_ms + answer_ms)
        transfers.append(transfer_ms)
        answers.append(answer_ms)
    terms = {"first_token_ms": [first_ms] * len(workers), "transfer_ms": transfers, "answer_ms": answers}
    if request.session is None:
        return Costs(totals, terms)
    return _with_affinity(totals, terms, _session_costs(request.session, MAX_AFFINITY_MS, workers))


def _with_affinity(totals: Sequence[float], terms: Mapping[str, Sequence[float]], affinities: Sequence[float]) -> Costs:
    return Costs(list(map(add, totals, affinities)), {**terms, "affinity_ms": affinities})


def _reuse_premium(workers: Sequence[WorkerView]) -> float:
    """Return the cost factor of recomputed tokens.

    The factor falls with the number of earlier prompts that diverged after the cached prefix.
    """
    best = max(workers, key=lambda worker: worker.hit_blocks + worker.tier_blocks)
    return max(SHARED_REUSE_PREMIUM, REUSE_PREMIUM / (1 + best.branches))


def _session_costs(session: str, cost_ms: float, workers: Sequence[WorkerView]) -> list[float]:
    """Return the affinity cost of each worker: 0 for the session's home worker, `cost_ms` otherwise."""
    home = home_of(session.encode(), workers)
    return [0.0 if worker is home else cost_ms for worker in workers]


class Strategy(StrEnum):
    """Name of a policy in the configuration."""

    ROUND_ROBIN = auto()
    LEAST_TOKENS = auto()
    PREFIX_HASH = auto()
    CACHE_AWARE = auto()


POLICIES: Mapping[Strategy, Policy] = MappingProxyType(
    {
        Strategy.ROUND_ROBIN: RoundRobin(),
        Strategy.LEAST_TOKENS: LeastTokens(),
        Strategy.PREFIX_HASH: PrefixHash(),
        Strategy.CACHE_AWARE: CacheAware(),
    }
)
