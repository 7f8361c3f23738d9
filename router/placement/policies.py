"""How one worker is chosen among the candidates: a policy computes the cost of each, the cheapest is taken. Pure."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from operator import add, attrgetter
from typing import NamedTuple

from baton.router.placement.rates import expected_here, prompt_tokens_per_s, token_gap_ms
from baton.router.placement.views import PlacementRequest, WorkerView

KEEP, KEEP_SHARED = 40.0, 4.0
PATIENCE_MS = 10_000.0
BALANCE = 0.2
BUSY_FACTOR, BUSY_MS = 2.0, 1_000.0
"""A decode worker takes the prompt, although it slows other answers down, when it would produce the first token at
least 2x and 1 s sooner than the best prefill worker."""


class Costs(NamedTuple):
    """One number per worker, in the order of the workers. A total is the sum of the terms, which are kept to be shown:
    an explanation is what decided, and is not made anew.
    """

    totals: Sequence[float]
    terms: Mapping[str, Sequence[float]]  # by name, with the unit in the name; a term that is 0 for all may be left out


class Policy(ABC):
    """`workers` are never empty. Costs of one call have one unit."""

    @abstractmethod
    def prefill_costs(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> Costs:
        """Of computing the prompt there."""

    def decode_costs(
        self, request: PlacementRequest, workers: Sequence[WorkerView], prefill: WorkerView | None
    ) -> Costs:
        """Of making the answer there. `prefill` computes the prompt; None: the decode worker does."""
        return self.prefill_costs(request, workers)

    def local_limit_ms(self, prefill_ms: float) -> float | None:
        """A decode worker computes the prompt itself where it would have the first token sooner than this limit.

        `prefill_ms`: when the best prefill worker would have it; the limit is never longer. None: no decode worker
        takes over a prompt that a prefill worker can compute.
        """
        return None


def cheapest(costs: Sequence[float], turn: int) -> int:
    """Its place. Equal ones take turns, so that none of them is left out."""
    least = min(costs)
    if costs.count(least) == 1:
        return costs.index(least)
    equal = [place for place, cost in enumerate(costs) if cost == least]
    return equal[turn % len(equal)]


def home_of(key: bytes, workers: Sequence[WorkerView]) -> WorkerView:
    """The same worker for the same key and endpoints, in any order: rendezvous hashing, which keeps no state.

    If a worker leaves, only its keys move; if one joins, it takes its share from all others (Thaler and Ravishankar,
    1998).
    """
    return max(workers, key=lambda worker: _weight(key, worker.endpoint))


def _weight(key: bytes, endpoint: str) -> bytes:
    digest = hashlib.blake2b(key, digest_size=8)
    digest.update(endpoint.encode())
    return digest.digest()


class RoundRobin(Policy):
    def prefill_costs(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> Costs:
        turns = [(place - request.turn) % len(workers) for place in range(len(workers))]
        return Costs(turns, {"turns_away": turns})


class LeastTokens(Policy):
    def prefill_costs(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> Costs:
        in_flight = [worker.tokens_in_flight for worker in workers]
        less_cached = [-request.hit_tokens(worker) for worker in workers]
        terms = {"tokens_in_flight": in_flight, "less_cached_tokens": less_cached}
        return Costs(list(map(add, in_flight, less_cached)), terms)


class PrefixHash(Policy):
    """Prompts that begin alike go to the same worker, whatever its cache has.

    The hash covers the first PREFIX_TOKENS, so that prompts that share only a short instruction go to different
    workers. It ignores load, so a popular prefix makes a busy worker. Prompts of less than a block, and decode workers,
    are chosen by tokens in flight.
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


_HIT_BLOCKS = attrgetter("hit_blocks")


class CacheAware(Policy):
    """Costs are milliseconds: expected ones, and additions that weigh later requests.

    By expected time alone, a conversation leaves its cache whenever its worker is a moment busier than another, and the
    next turns are computed again as well: hits fall by a sixth to a third (docs/routing.md). So each token that would
    be computed again, though some worker has it, costs KEEP times its time. PATIENCE_MS bounds that premium, so that a
    prefix which more requests want than one worker can serve is computed on another, and then on a third. The shortest
    wait is added to the bound, since under overload computing twice gains nothing. A prefix that every worker has makes
    no difference.

    Recent work counts a little (BALANCE): among idle workers the one that did least of it is next, which also keeps
    their evictions equally old.
    """

    def prefill_costs(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> Costs:
        paces = [1e3 / worker.rates.prefill_tokens_per_s for worker in workers]
        return _prompt_costs(request, workers, paces, [worker.tokens_in_flight for worker in workers])

    def decode_costs(
        self, request: PlacementRequest, workers: Sequence[WorkerView], prefill: WorkerView | None
    ) -> Costs:
        """Of an answer of charged length."""
        if prefill is not None:
            return _remote_costs(request, workers, prefill)
        paces = [1e3 / prompt_tokens_per_s(worker) for worker in workers]
        prompt = _prompt_costs(request, workers, paces, [worker.pending_prompt_tokens for worker in workers])
        answers = [request.charged_answer_tokens * token_gap_ms(request, worker) for worker in workers]
        return Costs(list(map(add, prompt.totals, answers)), {**prompt.terms, "answer_ms": answers})

    def local_limit_ms(self, prefill_ms: float) -> float | None:
        limit_ms = (prefill_ms - BUSY_MS) / BUSY_FACTOR
        return limit_ms if limit_ms > 0 else None


def _prompt_costs(
    request: PlacementRequest, workers: Sequence[WorkerView], paces: Sequence[float], waiting_tokens: Sequence[int]
) -> Costs:
    """`paces`: milliseconds per token of the prompt. One loop without calls: this runs for every request."""
    prompt_tokens, reusable, block_tokens = request.prompt_tokens, request.reusable_blocks, request.block_tokens
    totals, waits, computes, balances, hits = [], [], [], [], []
    for worker, pace, waiting in zip(workers, paces, waiting_tokens, strict=True):
        blocks = worker.hit_blocks
        hit_tokens = (blocks if blocks < reusable else reusable) * block_tokens
        wait_ms, compute_ms = waiting * pace, (prompt_tokens - hit_tokens) * pace
        balance_ms = BALANCE * worker.recent_tokens * pace
        totals.append(wait_ms + compute_ms + balance_ms)
        waits.append(wait_ms)
        computes.append(compute_ms)
        balances.append(balance_ms)
        hits.append(hit_tokens)
    terms = {"wait_ms": waits, "compute_ms": computes, "balance_ms": balances}
    best_tokens = max(hits)
    if request.session is not None:
        return _with_affinity(totals, terms, _away(request.session, PATIENCE_MS + min(waits), workers))
    if best_tokens == min(hits):
        return Costs(totals, terms)
    extra, longest_ms, affinities = _keep(workers) - 1.0, PATIENCE_MS + min(waits), []
    for hit_tokens, pace in zip(hits, paces, strict=True):
        again_ms = extra * (best_tokens - hit_tokens) * pace
        affinities.append(again_ms if again_ms < longest_ms else longest_ms)
    return _with_affinity(totals, terms, affinities)


def _remote_costs(request: PlacementRequest, workers: Sequence[WorkerView], prefill: WorkerView) -> Costs:
    """Of decode workers that take the KV over from `prefill`. One loop too."""
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
    return _with_affinity(totals, terms, _away(request.session, PATIENCE_MS, workers))


def _with_affinity(totals: Sequence[float], terms: Mapping[str, Sequence[float]], affinities: Sequence[float]) -> Costs:
    return Costs(list(map(add, totals, affinities)), {**terms, "affinity_ms": affinities})


def _keep(workers: Sequence[WorkerView]) -> float:
    """The less, the more prompts diverge where the known part of this one ends."""
    best = max(workers, key=_HIT_BLOCKS)
    return max(KEEP_SHARED, KEEP / (1 + best.branches))


def _away(session: str, cost_ms: float, workers: Sequence[WorkerView]) -> list[float]:
    """The cost of each worker for not being the session's."""
    home = home_of(session.encode(), workers)
    return [0.0 if worker is home else cost_ms for worker in workers]
