"""Choice of the workers that serve a request: a pure function of the request and a snapshot of the cluster.

A policy (policies.py) computes the cost of each candidate, and the cheapest wins. Only decode workers with credit are
candidates, so that no prompt is computed without capacity for its answer. A decode worker computes the prompt itself
if there is no prefill worker, if nearly all of the prompt is cached there, or, with `cache_aware`, if the prefill
workers are too busy.
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto
from itertools import compress
from typing import NamedTuple

from baton.process.registry.worker_record import WorkerRole
from baton.router.placement.eligible import Reason, deferred_decode, deferred_prefill, ineligible
from baton.router.placement.files_source import FetchSource, files_source
from baton.router.placement.policies import POLICIES, Costs, Policy, Strategy, cheapest
from baton.router.placement.rates import (
    NOTHING_LOADED,
    expected_here,
    expected_ttft_ms,
    has_answers,
    known_tokens,
    loading,
    token_gap_ms,
)
from baton.router.types.placement import PlacementRequest, WorkerView


class LocalPrefill(StrEnum):
    """Reason why a decode worker computes the prompt itself."""

    NO_PREFILL_WORKER = auto()
    PREFILL_WORKERS_FAILED = auto()  # all prefill workers have failed this request before
    SHORT_SUFFIX = auto()  # nearly all of the prompt is cached at the decode worker
    PREFILL_WORKERS_BUSY = auto()  # the first token would come much later from a prefill worker
    POOLED = auto()  # no answer to generate: `Decision.decode` is the prefill worker that computes the vector


@dataclass(slots=True)  # not frozen: constructing a frozen one takes three times as long, for every request
class Weighed:
    """Candidates for the prompt or for the answer, the cost of each, and the cheapest one."""

    workers: Sequence[WorkerView]
    costs: Costs
    worker: WorkerView

    def terms(self) -> Mapping[str, Mapping[str, float]]:
        """Return each candidate's cost terms: by endpoint, then by the term's name."""
        columns = self.costs.terms.items()
        return {
            worker.endpoint: {name: column[index] for name, column in columns}
            for index, worker in enumerate(self.workers)
        }

    def totals(self) -> Mapping[str, float]:
        """Return each candidate's total cost, by endpoint."""
        return {worker.endpoint: total for worker, total in zip(self.workers, self.costs.totals, strict=True)}

    def only(self, endpoints: Set[str]) -> "Weighed":
        """Return a copy with only the candidates at these endpoints."""
        kept = [worker.endpoint in endpoints for worker in self.workers]
        terms = {name: list(compress(column, kept)) for name, column in self.costs.terms.items()}
        costs = Costs(list(compress(self.costs.totals, kept)), terms)
        return Weighed(list(compress(self.workers, kept)), costs, self.worker)


@dataclass(slots=True)
class Decision:
    """Placement decision with its costs.

    `prefill` has costs even if `local` says that a decode worker computes the prompt.
    """

    workers: Sequence[WorkerView]  # all workers that were considered
    suited: Sequence[WorkerView]  # workers with the request's model
    prefill: Weighed | None
    decode: Weighed
    local: LocalPrefill | None
    soonest_prefill_ms: float = 0.0  # TTFT of the best prefill worker, if `local` depended on it
    first_token_in_ms: float = math.inf  # time that was left for the first token when this was decided

    def kept(self, most: int) -> "Decision":
        """Return a copy with at most `most` workers: the chosen workers, then the first of the others."""
        if len(self.workers) <= most:
            return self
        chosen = [each.worker for each in (self.prefill, self.decode) if each is not None]
        workers = [*chosen, *(worker for worker in self.workers if worker not in chosen)][:most]
        endpoints = {worker.endpoint for worker in workers}
        prefill = self.prefill.only(endpoints) if self.prefill is not None else None
        return replace(self, workers=workers, suited=(), prefill=prefill, decode=self.decode.only(endpoints))


class NoPrefillWorker(StrEnum):
    """Handling of a prompt that no prefill worker can compute."""

    QUEUE = auto()  # the request waits for a prefill worker, for a bounded time
    LOCAL = auto()  # a decode worker computes the prompt
    REJECT = auto()  # the request fails with UNAVAILABLE immediately


_LOCAL, _DECODE = NoPrefillWorker.LOCAL, WorkerRole.DECODE  # looking up an enum member is slow in a hot path


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """Settings of placement: the policy, and when decode workers compute prompts."""

    no_prefill_worker: NoPrefillWorker
    local_prefill_tokens: int  # maximum number of uncached prompt tokens that a decode worker computes itself
    strategy: Strategy

    @property
    def weighing(self) -> Policy:
        return POLICIES[self.strategy]


class Placement(NamedTuple):
    """Placement of one attempt and its reasons. Workers are named by endpoint."""

    prefill: str | None  # None: the decode worker computes the prompt
    decode: str
    prefill_hit_tokens: int
    decode_hit_tokens: int
    prefill_tokens_in_flight: int
    decode_tokens_in_flight: int
    prefill_candidates: int
    decode_candidates: int
    local_prefill: LocalPrefill | None = None  # why `prefill` is None
    fetch_from: str | None = None  # worker from which the prefill worker fetches a longer prefix
    fetch_tokens: int = 0  # length of the prefix to fetch
    expected_ttft_ms: float = 0.0  # from dispatch to first token
    expected_token_gap_ms: float = 0.0
    policy: str = ""
    prefill_ready_tokens: int = (
        0  # part of prefill_hit_tokens that is cached now; prompts in flight will cache the rest
    )
    loaded_tokens: int = 0  # tokens after the hits, which the computing worker loads from files
    load_ms: float = 0.0  # loading time of loaded_tokens, which overlaps with the wait
    fetch_loaded_tokens: int = 0  # tokens at the end of the fetched prefix that fetch_from must first load from files
    fetch_load_bytes_per_s: float = 0.0  # rate at which fetch_from loads files

    @property
    def computing(self) -> str:
        """Endpoint of the worker that computes the prompt."""
        return self.decode if self.prefill is None else self.prefill

    @property
    def computes_for_others(self) -> bool:
        """Return whether a prefill worker computes the prompt."""
        return self.prefill is not None or self.local_prefill is LocalPrefill.POOLED

    @property
    def endpoints(self) -> tuple[str, ...]:
        return (self.decode,) if self.prefill is None else (self.decode, self.prefill)


class NoRoom(Enum):
    """Reason why a request cannot be placed now."""

    NO_PREFILL_WORKER = auto()
    NO_DECODE_WORKER = auto()
    NO_CREDIT = auto()  # no worker has enough credit now: the request waits
    TOO_LONG = auto()  # the longest possible choice exceeds the pool of every decode worker
    TOO_MANY_CHOICES = auto()  # the request has more sequences than any decode worker has batch slots
    NO_POOLING_WORKER = auto()  # all prefill workers are of releases that compute no vectors


_NO_ROOM = {  # in order of precedence: if workers have several reasons, the first one listed is returned
    Reason.NO_FREE_SLOT: NoRoom.NO_CREDIT,
    Reason.NO_CREDIT: NoRoom.NO_CREDIT,
    Reason.PROMPTS_AHEAD: NoRoom.NO_CREDIT,
    Reason.POOL_TOO_SMALL: NoRoom.TOO_LONG,
    Reason.TOO_FEW_SLOTS: NoRoom.TOO_MANY_CHOICES,
    Reason.NO_VECTORS: NoRoom.NO_POOLING_WORKER,
}
_CANNOT_POOL = frozenset({Reason.OTHER_MODEL, Reason.NO_VECTORS})


def place(request: PlacementRequest, workers: Sequence[WorkerView], policy: PlacementPolicy) -> Placement | NoRoom:
    """Place a request, or return why it cannot be placed. `workers`: available workers (connected, not draining)."""
    decision = decide(request, workers, policy)
    return decision if isinstance(decision, NoRoom) else placement_of(request, decision, policy)


def placement_of(request: PlacementRequest, decision: Decision, policy: PlacementPolicy) -> Placement:
    computing, decode, local = decision.prefill, decision.decode.worker, decision.local
    prefill = computing.worker if computing is not None and local is None else None
    first = prefill or decode  # worker that generates the first token
    expected, hit_tokens, ready_tokens = expected_here(request, first), request.hit_tokens, request.ready_tokens
    source = _fetch_source(request, decision.suited, decode, prefill) if prefill else None
    loaded = loading(request, first) if first.tier_blocks else NOTHING_LOADED
    return Placement(
        prefill=prefill.endpoint if prefill else None,
        decode=decode.endpoint,
        prefill_hit_tokens=hit_tokens(prefill) if prefill else 0,
        # A transfer can skip only blocks that are cached now. A local prompt can also wait for equal prompts in flight.
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
        policy=policy.strategy.value,
        prefill_ready_tokens=ready_tokens(prefill) if prefill else 0,
        loaded_tokens=request.block_tokens * loaded.blocks,
        load_ms=round(loaded.ms, 3),
        fetch_loaded_tokens=request.block_tokens * source.loaded_blocks if source else 0,
        fetch_load_bytes_per_s=source.load_bytes_per_s if source else 0.0,
    )


def decide(request: PlacementRequest, workers: Sequence[WorkerView], policy: PlacementPolicy) -> Decision | NoRoom:
    """Return the chosen workers with the costs of all candidates, or why the request cannot be placed."""
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
    untried = _untried_prefill(request, prefill, with_credit)
    computing = _weigh_prefill(request, untried or prefill, policy.weighing) if prefill else None
    source = computing.worker if computing else None
    answering = _weigh_decode(request, _preferred_decode(request, with_credit, source), source, policy.weighing)
    decision = Decision(workers, suited, computing, answering, None, first_token_in_ms=request.first_token_in_ms)
    if computing is None:
        return replace(decision, local=LocalPrefill.NO_PREFILL_WORKER)
    if not untried and policy.no_prefill_worker is _LOCAL:
        return replace(decision, local=LocalPrefill.PREFILL_WORKERS_FAILED)
    if _is_short(request, answering.worker, computing.workers, policy):
        return replace(decision, local=LocalPrefill.SHORT_SUFFIX)
    return _without_busy(request, decision, computing, with_credit, policy)


def _untried_prefill(
    request: PlacementRequest, prefill: Sequence[WorkerView], decode: Sequence[WorkerView]
) -> Sequence[WorkerView]:
    """Return the prefill workers that have not failed this request and have a working transfer to some decode worker.

    If it returns none, the caller considers all prefill workers.
    """
    if not (request.avoided_prefill or request.broken_pairs):
        return prefill
    return [worker for worker in prefill if deferred_prefill(request, worker, decode) is None]


def _preferred_decode(
    request: PlacementRequest, decode: Sequence[WorkerView], source: WorkerView | None
) -> Sequence[WorkerView]:
    """Return the last attempt's decode worker, if transfers from `source` to it work; else all decode workers to
    which transfers work; else all decode workers.
    """
    reachable = decode
    if request.broken_pairs:
        reachable = [worker for worker in decode if deferred_decode(request, worker, source) is None]
    own = [worker for worker in reachable if worker.endpoint == request.preferred_decode]
    return own or reachable or decode


def _no_room(reasons: Iterable[Reason | None], otherwise: NoRoom) -> NoRoom:
    """Return the first of the workers' reasons in the order of _NO_ROOM, where temporary reasons come first."""
    found = set(reasons)
    return next((no_room for reason, no_room in _NO_ROOM.items() if reason in found), otherwise)


def _without_busy(
    request: PlacementRequest,
    decision: Decision,
    computing: Weighed,
    with_credit: Sequence[WorkerView],
    policy: PlacementPolicy,
) -> Decision:
    """Return the decision; if the prefill workers are too busy, one in which a decode worker computes the prompt."""
    weighing, chosen_ms = policy.weighing, expected_ttft_ms(request, computing.worker)
    if policy.no_prefill_worker is not _LOCAL or weighing.local_limit_ms(chosen_ms, request.first_token_in_ms) is None:
        return decision
    soonest_ms = _soonest_ms(request, computing.workers)
    limit_ms = weighing.local_limit_ms(soonest_ms, request.first_token_in_ms)
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
    """Choose the worker that computes a vector: a prefill worker, if any can.

    Otherwise choose a decode worker, if decode workers may compute prompts.
    """
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
    """Return a worker that has more of the prompt cached, in its pool or in files, than `prefill`; None without one."""
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
    """Return whether the decode worker has nearly all of the prompt cached, and no prefill worker would be faster.

    If the decode worker has no answers, the prefill workers' expected TTFT is ignored.
    """
    its_tokens = known_tokens(request, decode)
    if not its_tokens or request.prompt_tokens - its_tokens > policy.local_prefill_tokens:
        return False
    return not has_answers(decode) or expected_ttft_ms(request, decode) <= _soonest_ms(request, prefill)


def _soonest_ms(request: PlacementRequest, workers: Sequence[WorkerView]) -> float:
    return min([expected_ttft_ms(request, worker) for worker in workers])


def excluded(request: PlacementRequest, decision: Decision, worker: WorkerView) -> Reason | None:
    """Return why the worker was not a candidate in this decision; None for a candidate."""
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
