"""Decision which workers serve a request: a pure function of the request and a snapshot of the cluster.

A policy computes the cost of each candidate, and the cheapest one wins. Only decode workers with credit are candidates,
so that no prompt is computed without room for its answer. A decode worker computes the prompt itself if there is no
prefill worker, if nearly all of the prompt is cached there, or, with `cache_aware`, if the prefill workers are too
busy. While it generates answers it computes prompts at the rate that they leave.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum, auto
from operator import add
from types import MappingProxyType
from typing import NamedTuple

from baton.process.registry.worker_record import WorkerRole
from baton.router.placement.eligible import Reason, deferred_decode, deferred_prefill, ineligible
from baton.router.placement.files_source import FetchSource, files_source
from baton.router.placement.rates import (
    NOTHING_LOADED,
    expected_here,
    expected_ttft_ms,
    exposed_load_ms,
    has_answers,
    known_tokens,
    loading,
    prompt_tokens_per_s,
    token_gap_ms,
)
from baton.router.types.placement import PlacementRequest, WorkerView

REUSE_PREMIUM, SHARED_REUSE_PREMIUM = 40.0, 4.0
MAX_AFFINITY_MS = 10_000.0
RECENT_LOAD_WEIGHT = 0.2
BUSY_FACTOR, BUSY_MS = 2.0, 1_000.0
"""A decode worker takes the prompt, although it slows other answers down, when it would produce the first token at
least 2x and 1 s sooner than the best prefill worker."""


class Costs(NamedTuple):
    """Costs, one number per worker, in the order of the workers. A total is the sum of the terms, which are kept for
    the explanation.
    """

    totals: Sequence[float]
    terms: Mapping[str, Sequence[float]]  # by name, with the unit in the name; a term that is 0 for all may be left out


class Policy(ABC):
    """Policy of costs. `workers` are never empty. Costs of one call have one unit."""

    @abstractmethod
    def prefill_costs(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> Costs:
        """Return the cost of computing the prompt at each worker."""

    def decode_costs(
        self, request: PlacementRequest, workers: Sequence[WorkerView], prefill: WorkerView | None
    ) -> Costs:
        """Return the cost of generating the answer at each worker. `prefill` computes the prompt; None: the decode
        worker does.
        """
        return self.prefill_costs(request, workers)

    def local_limit_ms(self, prefill_ms: float) -> float | None:
        """A decode worker computes the prompt itself where it would have the first token sooner than this limit.

        `prefill_ms`: when the best prefill worker would have it; the limit is never longer. None: no decode worker
        takes over a prompt that a prefill worker can compute.
        """
        return None


def cheapest(costs: Sequence[float], turn: int) -> int:
    """Return the index of the lowest cost. Equal ones take turns, so that none of them is left out."""
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


class CacheAware(Policy):
    """Costs are milliseconds: expected ones, and additions that weigh later requests.

    By expected time alone, a conversation leaves its cache whenever its worker is a moment busier than another, and the
    next turns are computed again as well: hits fall by a sixth to a third (docs/routing.md). So a token that would be
    computed again, though some worker has it, costs REUSE_PREMIUM times its time. MAX_AFFINITY_MS bounds that premium,
    so that a prefix which more requests want than one worker can serve is computed on another, and then on a third. The
    shortest wait is added to the bound, since under overload computing twice gains nothing. A prefix that every worker
    has makes no difference. Tokens that a worker loads from files sooner than it would compute them count as cached,
    and cost their loading.

    Recent work counts a little (RECENT_LOAD_WEIGHT): among idle workers the one that did least of it is next, which
    also keeps their evictions equally old.
    """

    def prefill_costs(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> Costs:
        paces = [1e3 / worker.rates.prefill_tokens_per_s for worker in workers]
        return _prompt_costs(request, workers, paces, [worker.tokens_in_flight for worker in workers])

    def decode_costs(
        self, request: PlacementRequest, workers: Sequence[WorkerView], prefill: WorkerView | None
    ) -> Costs:
        """Return the costs of an answer of charged length."""
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
    """Return the costs of the prompt. `paces`: milliseconds per token. One loop without calls: this runs for every
    request.
    """
    prompt_tokens, reusable, block_tokens = request.prompt_tokens, request.reusable_blocks, request.block_tokens
    totals: list[float] = []
    waits, computes, balances, hits = [], [], [], []
    loads: dict[int, float] = {}  # by place, where there is anything to load
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
        terms["load_ms"] = [loads.get(place, 0.0) for place in range(len(workers))]
        totals = list(map(add, totals, terms["load_ms"]))
    best_tokens = max(hits)
    if request.session is not None:
        return _with_affinity(totals, terms, _away(request.session, MAX_AFFINITY_MS + min(waits), workers))
    if best_tokens == min(hits):
        return Costs(totals, terms)
    extra, longest_ms, affinities = _keep(workers) - 1.0, MAX_AFFINITY_MS + min(waits), []
    for hit_tokens, pace in zip(hits, paces, strict=True):
        again_ms = extra * (best_tokens - hit_tokens) * pace
        affinities.append(again_ms if again_ms < longest_ms else longest_ms)
    return _with_affinity(totals, terms, affinities)


def _remote_costs(request: PlacementRequest, workers: Sequence[WorkerView], prefill: WorkerView) -> Costs:
    """Return the costs at decode workers that take the KV over from `prefill`, in one loop."""
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
    return _with_affinity(totals, terms, _away(request.session, MAX_AFFINITY_MS, workers))


def _with_affinity(totals: Sequence[float], terms: Mapping[str, Sequence[float]], affinities: Sequence[float]) -> Costs:
    return Costs(list(map(add, totals, affinities)), {**terms, "affinity_ms": affinities})


def _keep(workers: Sequence[WorkerView]) -> float:
    """The less, the more prompts diverge where the known part of this one ends."""
    best = max(workers, key=_found_blocks)
    return max(SHARED_REUSE_PREMIUM, REUSE_PREMIUM / (1 + best.branches))


def _found_blocks(worker: WorkerView) -> int:
    return worker.hit_blocks + worker.tier_blocks


def _away(session: str, cost_ms: float, workers: Sequence[WorkerView]) -> list[float]:
    """The cost of each worker for not being the session's."""
    home = home_of(session.encode(), workers)
    return [0.0 if worker is home else cost_ms for worker in workers]


class LocalPrefill(StrEnum):
    """Reason why a decode worker computes the prompt itself."""

    NO_PREFILL_WORKER = auto()
    PREFILL_WORKERS_FAILED = auto()  # each of them failed this request before
    SHORT_SUFFIX = auto()  # next to nothing of the prompt is not cached there
    PREFILL_WORKERS_BUSY = auto()  # the way over them would take much longer
    POOLED = auto()  # there is no answer: a prefill worker computes the prompt, and stands as `Decision.decode`


@dataclass(slots=True)  # not frozen: made for every request, as the views are
class Weighed:
    """The candidates for one part of the work, the cost of each, and the one that was taken: the cheapest."""

    workers: Sequence[WorkerView]
    costs: Costs
    worker: WorkerView

    def terms(self) -> Mapping[str, Mapping[str, float]]:
        """Return the terms of each endpoint's cost, by name."""
        columns = self.costs.terms.items()
        return {
            worker.endpoint: {name: column[place] for name, column in columns}
            for place, worker in enumerate(self.workers)
        }

    def totals(self) -> Mapping[str, float]:
        """Return the total cost of each endpoint."""
        return {worker.endpoint: total for worker, total in zip(self.workers, self.costs.totals, strict=True)}

    def only(self, endpoints: Set[str]) -> "Weighed":
        places = [place for place, worker in enumerate(self.workers) if worker.endpoint in endpoints]

        def at(column: Sequence[float]) -> Sequence[float]:
            return [column[place] for place in places]

        costs = Costs(at(self.costs.totals), {name: at(column) for name, column in self.costs.terms.items()})
        return Weighed([self.workers[place] for place in places], costs, self.worker)


@dataclass(slots=True)
class Decision:
    """Decision with its costs. `prefill` is weighed even if `local` then says that it is not used; if the prefill
    workers were too busy, `decode` was weighed with one of them.
    """

    workers: Sequence[WorkerView]  # all that were looked at
    suited: Sequence[WorkerView]  # those of them that have the model
    prefill: Weighed | None
    decode: Weighed
    local: LocalPrefill | None
    soonest_prefill_ms: float = 0.0  # to the first token over a prefill worker, where `local` depended on that

    def kept(self, most: int) -> "Decision":
        """Return the decision with at most that many workers: the chosen ones and the first of the others."""
        if len(self.workers) <= most:
            return self
        taken = [each.worker for each in (self.prefill, self.decode) if each is not None]
        workers = [*taken, *(worker for worker in self.workers if worker not in taken)][:most]
        endpoints = {worker.endpoint for worker in workers}
        prefill = self.prefill.only(endpoints) if self.prefill is not None else None
        return replace(self, workers=workers, suited=(), prefill=prefill, decode=self.decode.only(endpoints))


class NoPrefillWorker(StrEnum):
    """Handling of a prompt that no prefill worker can compute."""

    QUEUE = auto()  # it waits for one, bounded
    LOCAL = auto()  # the decode worker computes it
    REJECT = auto()  # UNAVAILABLE at once


_LOCAL, _DECODE = NoPrefillWorker.LOCAL, WorkerRole.DECODE  # looked up for every worker and request


class Strategy(StrEnum):
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


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    no_prefill_worker: NoPrefillWorker
    local_prefill_tokens: int  # maximum number of uncached prompt tokens that a decode worker computes itself
    strategy: Strategy
    weighing: Policy = field(init=False, repr=False, compare=False)
    name: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Looked up once, and not for every request."""
        object.__setattr__(self, "weighing", POLICIES[self.strategy])
        object.__setattr__(self, "name", self.strategy.value)


class Placement(NamedTuple):
    """Placement and its reasons. Workers are named by endpoint; the counts are of tokens unless named otherwise."""

    prefill: str | None  # None: the decode worker computes the prompt
    decode: str
    prefill_hit_tokens: int
    decode_hit_tokens: int
    prefill_tokens_in_flight: int
    decode_tokens_in_flight: int
    prefill_candidates: int
    decode_candidates: int
    local_prefill: LocalPrefill | None = None  # given where there is no prefill worker
    fetch_from: str | None = None  # the worker that has more of the prompt than the prefill worker, if any
    fetch_tokens: int = 0  # how much of the prompt, from its beginning, that is
    expected_ttft_ms: float = 0.0  # from the dispatch to the first token, as far as rates are known
    expected_token_gap_ms: float = 0.0
    policy: str = ""
    prefill_ready_tokens: int = 0  # of prefill_hit_tokens: present ones, not those expected of prompts in flight
    loaded_tokens: int = 0  # behind the hits of the worker that computes the prompt: those that it loads from files
    load_ms: float = 0.0  # which takes so long; in expected_ttft_ms is what outlasts the wait
    fetch_loaded_tokens: int = 0  # of fetch_tokens, the last ones: in files of fetch_from, which loads them first
    fetch_load_bytes_per_s: float = 0.0  # at this rate

    @property
    def computing(self) -> str:
        """The worker that computes the prompt."""
        return self.decode if self.prefill is None else self.prefill

    @property
    def computes_for_others(self) -> bool:
        """Return whether it is a prefill worker."""
        return self.prefill is not None or self.local_prefill is LocalPrefill.POOLED

    @property
    def endpoints(self) -> tuple[str, ...]:
        return (self.decode,) if self.prefill is None else (self.decode, self.prefill)


class NoRoom(Enum):
    """Reason why there is no placement now."""

    NO_PREFILL_WORKER = auto()
    NO_DECODE_WORKER = auto()
    NO_CREDIT = auto()  # wait
    TOO_LONG = auto()  # one choice at its longest is more than the pool of any decode worker
    TOO_MANY_CHOICES = auto()  # more sequences than any decode worker runs at once
    NO_POOLING_WORKER = auto()  # prefill workers there are, of releases that make no vectors


_NO_ROOM = {  # in this order
    Reason.NO_FREE_SLOT: NoRoom.NO_CREDIT,
    Reason.NO_CREDIT: NoRoom.NO_CREDIT,
    Reason.PROMPTS_AHEAD: NoRoom.NO_CREDIT,
    Reason.POOL_TOO_SMALL: NoRoom.TOO_LONG,
    Reason.TOO_FEW_SLOTS: NoRoom.TOO_MANY_CHOICES,
    Reason.NO_VECTORS: NoRoom.NO_POOLING_WORKER,
}
_CANNOT_POOL = frozenset({Reason.OTHER_MODEL, Reason.NO_VECTORS})


def place(request: PlacementRequest, workers: Sequence[WorkerView], policy: PlacementPolicy) -> Placement | NoRoom:
    """Place a request. `workers` are those that take work now: connected, not draining."""
    decision = decide(request, workers, policy)
    return decision if isinstance(decision, NoRoom) else placement_of(request, decision, policy)


def placement_of(request: PlacementRequest, decision: Decision, policy: PlacementPolicy) -> Placement:
    computing, decode, local = decision.prefill, decision.decode.worker, decision.local
    prefill = computing.worker if computing is not None and local is None else None
    first = prefill or decode  # which makes the first token
    expected, hit_tokens, ready_tokens = expected_here(request, first), request.hit_tokens, request.ready_tokens
    source = _fetch_source(request, decision.suited, decode, prefill) if prefill else None
    loaded = loading(request, first) if first.tier_blocks else NOTHING_LOADED
    return Placement(
        prefill=prefill.endpoint if prefill else None,
        decode=decode.endpoint,
        prefill_hit_tokens=hit_tokens(prefill) if prefill else 0,
        # a prompt that lands is looked up at once, one that is computed there waits for those that compute the same
        decode_hit_tokens=ready_tokens(decode) if prefill else hit_tokens(decode),
        prefill_tokens_in_flight=prefill.tokens_in_flight if prefill else 0,
        decode_tokens_in_flight=decode.tokens_in_flight,
        prefill_candidates=len(computing.workers) if computing else 0,
        decode_candidates=len(decision.decode.workers),
        local_prefill=local,
        fetch_from=source.worker.endpoint if source else None,
        fetch_tokens=request.block_tokens * source.blocks if source else 0,
        expected_ttft_ms=round(expected.ttft_ms, 3),
        expected_token_gap_ms=round(token_gap_ms(request, decode), 3),
        policy=policy.name,
        prefill_ready_tokens=ready_tokens(prefill) if prefill else 0,
        loaded_tokens=request.block_tokens * loaded.blocks,
        load_ms=round(loaded.ms, 3),
        fetch_loaded_tokens=request.block_tokens * source.loaded_blocks if source else 0,
        fetch_load_bytes_per_s=source.load_bytes_per_s if source else 0.0,
    )


def decide(request: PlacementRequest, workers: Sequence[WorkerView], policy: PlacementPolicy) -> Decision | NoRoom:
    """Return the chosen workers with everything that was weighed, or why there is no placement.

    Each choice has an order of preference, and takes the cheapest worker of the first group that is not empty:
    * prefill: workers without a failure of this request and with a working transfer; all.
    * decode: the request's own worker, if transfers to it work; workers with a working transfer; all with credit.
    """
    reasons = [ineligible(request, worker) for worker in workers]
    suited = [worker for worker, reason in zip(workers, reasons, strict=True) if reason is not Reason.OTHER_MODEL]
    if request.pooled:
        return _decide_pooled(request, workers, suited, reasons, policy)
    able = [worker for worker, reason in zip(workers, reasons, strict=True) if reason is None]
    prefill = [worker for worker in able if worker.role is not _DECODE]
    with_credit = [worker for worker in able if worker.role is _DECODE]
    if not prefill and policy.no_prefill_worker is not _LOCAL:
        return NoRoom.NO_PREFILL_WORKER
    if not with_credit:
        return _no_room(reasons, NoRoom.NO_DECODE_WORKER)
    untried, weighing = prefill, policy.weighing
    if request.avoided_prefill or request.broken_pairs:
        untried = [worker for worker in prefill if deferred_prefill(request, worker, with_credit) is None]
    computing = _weigh_prefill(request, untried or prefill, weighing) if prefill else None
    source, reachable = computing.worker if computing else None, with_credit
    if request.broken_pairs:
        reachable = [worker for worker in with_credit if deferred_decode(request, worker, source) is None]
    own = [worker for worker in reachable if worker.endpoint == request.preferred_decode]
    answering = _weigh_decode(request, own or reachable or with_credit, source, weighing)
    if computing is None:
        return Decision(workers, suited, None, answering, LocalPrefill.NO_PREFILL_WORKER)
    if not untried and policy.no_prefill_worker is _LOCAL:
        return Decision(workers, suited, computing, answering, LocalPrefill.PREFILL_WORKERS_FAILED)
    if _is_short(request, answering.worker, computing.workers, policy):
        return Decision(workers, suited, computing, answering, LocalPrefill.SHORT_SUFFIX)
    decision = Decision(workers, suited, computing, answering, None)
    return _without_busy(request, decision, computing, with_credit, policy)


def _no_room(reasons: Iterable[Reason | None], otherwise: NoRoom) -> NoRoom:
    """Return the reason that a wait ends soonest among those of the workers that could take this part of the work."""
    found = set(reasons)
    return next((no_room for reason, no_room in _NO_ROOM.items() if reason in found), otherwise)


def _without_busy(
    request: PlacementRequest,
    decision: Decision,
    computing: Weighed,
    with_credit: Sequence[WorkerView],
    policy: PlacementPolicy,
) -> Decision:
    """Let a decode worker compute the prompt if the prefill workers are too busy."""
    weighing, chosen_ms = policy.weighing, expected_ttft_ms(request, computing.worker)
    if policy.no_prefill_worker is not _LOCAL or weighing.local_limit_ms(chosen_ms) is None:
        return decision
    soonest_ms = _soonest_ms(request, computing.workers)
    limit_ms = weighing.local_limit_ms(soonest_ms)
    if limit_ms is None:
        return decision
    itself = _weigh_decode(request, with_credit, None, weighing)
    if expected_ttft_ms(request, itself.worker) >= limit_ms:
        return decision
    busy = LocalPrefill.PREFILL_WORKERS_BUSY
    return replace(decision, decode=itself, local=busy, soonest_prefill_ms=soonest_ms)


def _decide_pooled(
    request: PlacementRequest,
    workers: Sequence[WorkerView],
    suited: Sequence[WorkerView],
    reasons: Sequence[Reason | None],
    policy: PlacementPolicy,
) -> Decision | NoRoom:
    """Choose a prefill worker; a decode worker if no prefill worker is able to pool and decode workers may compute."""
    by_role: dict[WorkerRole, list[tuple[WorkerView, Reason | None]]] = {role: [] for role in WorkerRole}
    for worker, reason in zip(workers, reasons, strict=True):
        by_role[worker.role].append((worker, reason))
    able = {role for role in WorkerRole if any(reason not in _CANNOT_POOL for _, reason in by_role[role])}
    is_local = WorkerRole.PREFILL not in able and _DECODE in able and policy.no_prefill_worker is _LOCAL
    of_role = by_role[_DECODE if is_local else WorkerRole.PREFILL]
    with_room = [worker for worker, reason in of_role if reason is None]
    if not with_room:
        return _no_room([reason for _, reason in of_role], NoRoom.NO_PREFILL_WORKER)
    untried = [worker for worker in with_room if deferred_prefill(request, worker) is None] or with_room
    if is_local:
        weighed = _weigh_decode(request, untried, None, policy.weighing)
        return Decision(workers, suited, None, weighed, LocalPrefill.NO_PREFILL_WORKER)
    weighed = _weigh_prefill(request, untried, policy.weighing)
    return Decision(workers, suited, None, weighed, LocalPrefill.POOLED)


def _weigh_prefill(request: PlacementRequest, workers: Sequence[WorkerView], policy: Policy) -> Weighed:
    costs = policy.prefill_costs(request, workers)
    return Weighed(workers, costs, workers[cheapest(costs.totals, request.turn)])


def _weigh_decode(
    request: PlacementRequest, workers: Sequence[WorkerView], prefill: WorkerView | None, policy: Policy
) -> Weighed:
    costs = policy.decode_costs(request, workers, prefill)
    return Weighed(workers, costs, workers[cheapest(costs.totals, request.turn)])


def _fetch_source(
    request: PlacementRequest, suited: Sequence[WorkerView], decode: WorkerView, prefill: WorkerView
) -> FetchSource | None:
    """The worker with most of the prompt, if it has more than the prefill worker: in its pool, or else in files."""
    in_pool = _pool_source(request, suited, decode, prefill)
    if not max([worker.tier_blocks for worker in suited]):
        return in_pool
    return files_source(request, suited, prefill, in_pool.blocks if in_pool else 0) or in_pool


def _pool_source(
    request: PlacementRequest, suited: Sequence[WorkerView], decode: WorkerView, prefill: WorkerView
) -> FetchSource | None:
    reusable = request.reusable_blocks
    known = min(prefill.hit_blocks, reusable)
    if min(max([worker.ready_blocks for worker in suited]), reusable) <= known:
        return None
    others = [worker for worker in suited if worker is not prefill]
    ready = [min(worker.ready_blocks, reusable) for worker in others]
    most = max(ready)
    if most <= known:
        return None
    best = [worker for worker, blocks in zip(others, ready, strict=True) if blocks == most]
    return FetchSource(decode if decode in best else best[0], most)


def _is_short(
    request: PlacementRequest, decode: WorkerView, prefill: Sequence[WorkerView], policy: PlacementPolicy
) -> bool:
    """Return whether the decode worker has nearly all of the prompt cached and, if it has answers, computes the rest no
    later than others.
    """
    its_tokens = known_tokens(request, decode)
    if not its_tokens or request.prompt_tokens - its_tokens > policy.local_prefill_tokens:
        return False
    return not has_answers(decode) or expected_ttft_ms(request, decode) <= _soonest_ms(request, prefill)


def _soonest_ms(request: PlacementRequest, workers: Sequence[WorkerView]) -> float:
    return min([expected_ttft_ms(request, worker) for worker in workers])


def excluded(request: PlacementRequest, decision: Decision, worker: WorkerView) -> Reason | None:
    """Return why the worker was not weighed for its part of the request; None for a candidate."""
    computing = decision.prefill
    weighed = computing if worker.role is WorkerRole.PREFILL and not request.pooled else decision.decode
    if weighed is not None and any(worker is each for each in weighed.workers):
        return None
    if (reason := ineligible(request, worker)) is not None:
        return reason
    if request.pooled:
        needs_no_decode = worker.role is _DECODE and decision.local is LocalPrefill.POOLED
        return Reason.NO_ANSWER if needs_no_decode else Reason.FAILED_BEFORE
    if worker.role is WorkerRole.PREFILL:
        return deferred_prefill(request, worker) or Reason.BROKEN_PAIRS
    return deferred_decode(request, worker, computing.worker if computing else None) or Reason.NOT_PREFERRED
