"""Router's view of its workers: connections, reports, and this router's charges. Pure state.

Workers are named by endpoint. A charge is added when a request is placed and released exactly once.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import chain, islice

from baton.process.registry.worker_record import WorkerRole
from baton.router.cache.fan_out import PrefixFanOut
from baton.router.cache.prefix_index import Hits, hits_among
from baton.router.cache.replica import Caches
from baton.router.cache.tiers import TierDirectories
from baton.router.placement.decide import Placement
from baton.router.placement.peer_load import NOTHING, RecentPredictions, WorkerLoad
from baton.router.placement.rates import RateLedger
from baton.router.types.placement import PlacementRequest, WorkerView
from baton.router.types.worker import Adapter, WorkerAdapters, WorkerDescription, WorkerReport
from baton.text.block_groups import ONE_GROUP, BlockGroups

ALL_UP_TO = 64
HOLDERS, OTHERS = 16, 32
Pair = tuple[str, str]
"""Endpoint of a prefill worker and endpoint of a decode worker."""
_NONE: frozenset[Pair] = frozenset()
_NO_FILES: Mapping[str, int] = {}


Prefixes = Iterable[tuple[int, Sequence[str]]]
"""Numbers of a prompt's first blocks, the largest first, each with the workers that have that number."""


def shortlist(workers: Sequence[str], known: Set[str], prefixes: Prefixes, turn: int) -> Sequence[str]:
    """Return the workers that a placement decision considers: a limited number, to limit the cost of a decision.

    In a cluster of up to ALL_UP_TO workers, all are considered. In a larger cluster, up to HOLDERS workers that have
    most of the prompt cached are considered, and OTHERS further workers, which rotate with `turn`. The least busy of
    these is nearly as idle as the least busy worker of all (Mitzenmacher, The Power of Two Choices, 2001).
    `known`: the same workers as a set; `prefixes` may have others, too.
    """
    if len(workers) <= ALL_UP_TO:
        return workers
    listed, holders, most = _in_turn(workers, OTHERS, turn), list[str](), 0
    for blocks, names in prefixes:
        if len(holders) == HOLDERS or 2 * blocks <= most:
            break
        if not known.isdisjoint(names):
            most = most or blocks
            first = turn * HOLDERS % len(names)
            in_turn = chain(names[first:], names[:first])
            holders += islice(filter(known.__contains__, in_turn), HOLDERS - len(holders))
    return tuple(dict.fromkeys(listed + holders))


def _in_turn(workers: Sequence[str], count: int, turn: int) -> list[str]:
    first = turn * count % len(workers)
    return [*workers[first : first + count], *workers[: max(0, first + count - len(workers))]][: len(workers)]


@dataclass(frozen=True, slots=True)
class AttemptCharge:
    """Capacity that one attempt uses on one worker."""

    tokens: int
    blocks: int = 0
    slots: int = 0
    prompt_tokens: int = 0  # prompt tokens that a decode worker must still compute
    load_ms: float = 0.0  # time in which the worker loads blocks of the prompt from files


class Charges:
    """Charges of this router's attempts on one worker, by attempt id, with the sums over all attempts."""

    __slots__ = ("_charges", "blocks", "load_ms", "prompt_tokens", "slots", "tokens")

    def __init__(self) -> None:
        self._charges: dict[int, AttemptCharge] = {}
        self.tokens = self.blocks = self.slots = self.prompt_tokens = 0
        self.load_ms = 0.0

    def __len__(self) -> int:
        return len(self._charges)

    def __iter__(self) -> Iterator[int]:
        return iter(self._charges)

    def add(self, attempt_id: int, charge: AttemptCharge) -> None:
        """Add an attempt's charge. It replaces an earlier charge of the same attempt."""
        self.release(attempt_id)
        self._charges[attempt_id] = charge
        self.tokens += charge.tokens
        self.blocks += charge.blocks
        self.slots += charge.slots
        self.prompt_tokens += charge.prompt_tokens
        self.load_ms += charge.load_ms

    def prompt_computed(self, attempt_id: int) -> None:
        """Set a charge's prompt tokens and loading time to zero. The charge may have been released already."""
        charge = self._charges.get(attempt_id)
        if charge is not None:
            self._charges[attempt_id] = replace(charge, prompt_tokens=0, load_ms=0.0)
            self.prompt_tokens -= charge.prompt_tokens
            self._loaded(charge)

    def release(self, attempt_id: int) -> None:
        """Release a charge. It may have been released already."""
        charge = self._charges.pop(attempt_id, None)
        if charge is not None:
            self.tokens -= charge.tokens
            self.blocks -= charge.blocks
            self.slots -= charge.slots
            self.prompt_tokens -= charge.prompt_tokens
            self._loaded(charge)

    def _loaded(self, charge: AttemptCharge) -> None:
        """Subtract a charge's loading time without accumulating rounding errors."""
        self.load_ms = max(0.0, self.load_ms - charge.load_ms) if self._charges else 0.0

    def clear(self) -> None:
        for attempt_id in tuple(self._charges):
            self.release(attempt_id)


class LinkEnd(Enum):
    """State of the process behind a lost link, as this router knows it."""

    NONE = auto()  # no link was lost
    ANNOUNCED = auto()  # the process drained, or changed its role
    CUT = auto()  # the link was lost, but the process may live
    GONE = auto()


@dataclass(slots=True)
class Departures:
    """Counts of a worker's lost links by cause, since the router's start."""

    deaths: int = 0  # number of processes that ended without a complete drain
    drains: int = 0  # number of processes that ended after a complete drain
    role_changes: int = 0
    lost_sessions: int = 0  # number of links lost by silence or a late reconnect; the processes may still run

    def lost(self, end: LinkEnd, drained: bool) -> LinkEnd:
        """Count a lost link and return what is known about its process. `drained`: the worker had drained."""
        if end is LinkEnd.GONE:
            self._gone(drained)
        elif drained:
            return LinkEnd.ANNOUNCED
        elif end is LinkEnd.CUT:
            self.lost_sessions += 1
        return end

    def follow(self, end: LinkEnd, before: WorkerDescription, now: WorkerDescription) -> None:
        """Count a role change, or the end of the previous process, when a link with a later epoch opens."""
        if before.is_same_process(now):
            self.role_changes += before.role is not now.role
        elif end is not LinkEnd.GONE:
            self._gone(end is LinkEnd.ANNOUNCED)

    def _gone(self, drained: bool) -> None:
        if drained:
            self.drains += 1
        else:
            self.deaths += 1


WINDOW_S = 15.0
"""Time constant of recent work, measured in assigned work: after WINDOW_S of further work for the whole cluster, a
worker's recent work has decayed to 1/e.
"""


@dataclass(slots=True)
class _RecentTokens:
    tokens: float = 0.0
    age: float = 0.0  # value of RecentWork.age at the last update


class RecentWork:
    """Recently assigned work of each worker. It decays as more work is assigned, not with time."""

    def __init__(self) -> None:
        self._shares: dict[str, _RecentTokens] = {}
        self.age = 0.0  # work assigned to all workers since the start, in multiples of WINDOW_S

    def add(self, worker: str, tokens: int, tokens_per_s: float) -> None:
        """Add tokens that the worker must compute. `tokens_per_s`: rate of all workers together."""
        self.age += tokens / (WINDOW_S * tokens_per_s)
        share = self._shares.setdefault(worker, _RecentTokens(age=self.age))
        share.tokens = share.tokens * math.exp(share.age - self.age) + tokens
        share.age = self.age

    def of(self, worker: str) -> float:
        share = self._shares.get(worker)
        return share.tokens * math.exp(share.age - self.age) if share is not None else 0.0

    def forget(self, worker: str) -> None:
        self._shares.pop(worker, None)


STALLED_S = 15.0
"""Time without a step after which a worker counts as stalled: longer than any step, less than its watchdog's 30 s."""


class StallDetector:
    """Detects that a worker has work but takes no steps. Such a worker gets no new requests."""

    __slots__ = ("_since_s", "_steps")

    def __init__(self) -> None:
        self._steps: int | None = None
        self._since_s = 0.0

    def stalls(self, report: WorkerReport, now: float) -> bool:
        """Return whether the worker has had work for STALLED_S without a step."""
        has_work = report.running_sequences or report.pending_tokens or report.waiting_requests
        if not has_work or report.steps != self._steps:
            self._steps, self._since_s = report.steps, now
        return now - self._since_s > STALLED_S


FAILURES = 3
SUCCESSES = 3
FIRST_S, LAST_S = 5.0, 80.0


@dataclass(slots=True)
class _Trouble:
    failures: int = 0  # number of consecutive failed transfers
    successes: int = 0  # number of consecutive successful transfers
    aside_s: float = 0.0  # duration of the last suspension
    until_s: float = 0.0  # end of the last suspension, monotonic seconds


class PairCircuitBreaker:
    """Circuit breaker that suspends pairs of workers whose transfers fail. Each worker may still serve in other pairs.

    A pair that fails again after its suspension is suspended for twice as long. SUCCESSES consecutive successful
    transfers clear the failures of a pair. Pairs without failures take no memory.
    """

    def __init__(self) -> None:
        self._troubles: dict[Pair, _Trouble] = {}

    def failed(self, pair: Pair, now: float) -> None:
        trouble = self._troubles.setdefault(pair, _Trouble())
        trouble.successes = 0
        trouble.failures += 1
        if now >= trouble.until_s and (trouble.failures >= FAILURES or trouble.aside_s):
            trouble.aside_s = min(LAST_S, 2 * trouble.aside_s or FIRST_S)
            trouble.until_s = now + trouble.aside_s

    def succeeded(self, pair: Pair) -> None:
        trouble = self._troubles.get(pair)
        if trouble is None:
            return
        trouble.failures = 0
        trouble.successes += 1
        if trouble.successes >= SUCCESSES or not trouble.aside_s:
            del self._troubles[pair]

    def forget(self, endpoint: str) -> None:
        """Reset all pairs of a worker whose process is gone."""
        for pair in [pair for pair in self._troubles if endpoint in pair]:
            del self._troubles[pair]

    def broken(self, now: float) -> frozenset[Pair]:
        """Return the pairs that are suspended at `now`."""
        if not self._troubles:
            return _NONE
        return frozenset(pair for pair, trouble in self._troubles.items() if now < trouble.until_s)


@dataclass(frozen=True, slots=True)
class RefusedProcess:
    """Process that answers at a worker's endpoint but must not be used. `description`: None if it sent none."""

    why: str
    description: WorkerDescription | None


@dataclass(slots=True)
class Worker:
    """State of the worker at one endpoint. `description` and `epoch` keep their last values while disconnected."""

    endpoint: str
    role: WorkerRole
    connected: bool = False
    held: bool = False  # the link is open or may still reconnect: requests on the worker may continue
    description: WorkerDescription | None = None
    epoch: int = 0
    report: WorkerReport | None = None
    charges: Charges = field(default_factory=Charges)
    end: LinkEnd = LinkEnd.NONE  # what is known about the worker's last process
    died_s: float | None = None  # monotonic time at which the worker's process was last found gone
    progress: StallDetector = field(default_factory=StallDetector)
    stalled: bool = False  # the worker has work but takes no steps
    view: WorkerView | None = None  # cached view for a prompt without hits; immutable
    hit_view: WorkerView | None = None  # cached view for the last prompt with hits; immutable
    name: str = ""  # worker id in membership
    refused: RefusedProcess | None = None

    @property
    def available(self) -> bool:
        """Return whether the worker takes work now."""
        known = self.description is not None and self.report is not None and not self.report.draining
        return known and self.connected and not self.stalled

    def changed(self) -> None:
        """Drop the cached views."""
        self.view = self.hit_view = None


@dataclass(frozen=True, slots=True)
class AvailableWorkers:
    """Workers that take work now, by endpoint and by role."""

    workers: Mapping[str, Worker]
    by_role: Mapping[WorkerRole, tuple[str, ...]]
    known: Mapping[WorkerRole, frozenset[str]]  # by_role as sets

    def shortlist(self, prefixes: Prefixes, turn: int) -> dict[str, Worker]:
        """Return the workers of both roles that a placement decision considers; see `shortlist`."""
        listed: dict[str, Worker] = {}
        for role, endpoints in self.by_role.items():
            listed |= {name: self.workers[name] for name in shortlist(endpoints, self.known[role], prefixes, turn)}
        return listed


LATEST_AGE = 0.05
"""Maximum age of a cached view, in multiples of WINDOW_S of assigned work: recent work has decayed by 5 % by then."""

KEPT_NAMES = 1024
"""Number of remembered worker names, so that failed attempts can be explained after their worker is gone."""


class Cluster:
    """All workers in membership. Every change goes through a method."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._roles_seen: set[WorkerRole] = set()
        self.caches = Caches()
        self.tiers = TierDirectories()
        self.pairs = PairCircuitBreaker()
        self.departures: defaultdict[str, Departures] = defaultdict(Departures)
        """Counts of lost links by worker id."""
        self._peer_loads: Mapping[str, WorkerLoad] = {}
        self._names: dict[str, str] = {}  # worker id by endpoint, including workers that are gone
        self.rates = RateLedger()
        """Measured rates of all workers."""
        self._available: AvailableWorkers | None = None  # None: must be computed again
        self._recent, self._fan_out = RecentWork(), PrefixFanOut()
        self._seen_age = 0.0  # _recent.age for which the cached views are valid
        self.predictions = RecentPredictions()
        """Placements that the other routers have yet to learn."""

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple(self._workers.values())

    @property
    def roles_seen(self) -> frozenset[WorkerRole]:
        """Roles that any worker in membership has had since the start."""
        return frozenset(self._roles_seen)

    def add(self, endpoint: str, role: WorkerRole, name: str = "") -> None:
        """Add a worker of membership. `name`: its worker id there."""
        self._roles_seen.add(role)
        self._available = None
        self._workers[endpoint] = Worker(endpoint, role, name=name)

    def remove(self, endpoint: str) -> None:
        self._available = None
        self._workers.pop(endpoint, None)
        self._forget(endpoint)

    def connected(self, endpoint: str, description: WorkerDescription, epoch: int) -> None:
        worker = self._workers[endpoint]
        if epoch != worker.epoch:
            self._forget(endpoint)
            worker.report = None
            if worker.description is not None:
                self.departures[worker.description.worker_id].follow(worker.end, worker.description, description)
        worker.end, worker.refused = LinkEnd.NONE, None
        self.caches.connected(endpoint)
        worker.connected = worker.held = True
        worker.description, worker.epoch = description, epoch
        worker.role = description.role
        self._available = None
        worker.changed()
        self._names.pop(endpoint, None)
        self._names[endpoint] = description.worker_id
        if len(self._names) > KEPT_NAMES:
            del self._names[next(iter(self._names))]

    def has_adapters(self, endpoint: str, usable: tuple[Adapter, ...], adapter_list: WorkerAdapters) -> None:
        worker = self._workers.get(endpoint)
        if worker is not None and worker.description is not None:
            worker.description = replace(worker.description, adapters=usable, adapter_list=adapter_list)
            worker.changed()

    def refuse(self, endpoint: str, description: WorkerDescription | None, why: str) -> bool:
        """Record why the process at `endpoint` must not be used. The next link to the endpoint clears the reason.

        Return whether the reason is new.
        """
        worker, refused = self._workers[endpoint], RefusedProcess(why, description)
        if worker.refused is not None and worker.refused.why == why:
            return False
        worker.refused = refused
        return True

    def disconnected(self, endpoint: str) -> None:
        """Record a broken connection: the worker takes no new work until it reconnects."""
        if endpoint in self._workers:
            self._workers[endpoint].connected = False
            self._available = None
            self.caches.disconnected(endpoint)
            self.tiers.disconnected(endpoint)

    def lost(self, endpoint: str, end: LinkEnd = LinkEnd.CUT, now: float = 0.0) -> None:
        """Record a lost link, and drop all charges of the worker. `now`: monotonic seconds."""
        worker = self._workers.get(endpoint)
        if worker is not None:
            worker.died_s = now if end is LinkEnd.GONE else worker.died_s
            drained = worker.report is not None and worker.report.draining and not worker.charges
            worker.end = self.departures[self.name_of(endpoint)].lost(end, drained)
            self._available = None
            worker.connected = worker.held = False
            worker.report = None
            worker.changed()
            worker.charges.clear()

    def reported(self, endpoint: str, report: WorkerReport) -> None:
        worker = self._workers[endpoint]
        if worker.report is None or worker.report.draining != report.draining:
            self._available = None
        if worker.report is not report and worker.report != report:
            worker.changed()
        worker.report = report

    def measure(self, endpoint: str, report: WorkerReport, now: float) -> None:
        """Update the worker's measured rates from a report that arrived at `now`."""
        worker = self._workers[endpoint]
        stalled = worker.progress.stalls(report, now)
        if stalled != worker.stalled:
            worker.stalled, self._available = stalled, None
        self.rates.linked(endpoint, {link.endpoint: link.gb_per_s for link in report.links})
        if worker.role is WorkerRole.DECODE:
            tokens = worker.charges.tokens
            self.rates.reported_prefill(endpoint, report.alone_tokens_per_s, report.beside_tokens_per_s)
            self.rates.reported(endpoint, report.steps, report.running_sequences > 0, tokens, now)

    def name_of(self, endpoint: str) -> str:
        """Return a worker's id, even if the worker is gone; its endpoint if the id is unknown or forgotten."""
        worker = self._workers.get(endpoint)
        if worker is not None and worker.description is not None:
            return worker.description.worker_id
        return self._names.get(endpoint) or (worker.name if worker is not None else "") or endpoint

    def find(self, endpoint: str) -> Worker | None:
        return self._workers.get(endpoint)

    def snapshot(self, block_hashes: Sequence[bytes], turn: int | None = None) -> tuple[WorkerView, ...]:
        """Return the available workers, with the cached blocks of this prompt, for a placement decision.

        `turn`: number of the request, which selects a shortlist; None: all workers.
        """
        ends, available = self.caches.index.ends(block_hashes), self._find_available()
        self._forget_old_views()
        if turn is None or len(available.workers) <= ALL_UP_TO:
            workers: Collection[Worker] = available.workers.values()
            hits = hits_among(ends)
        else:
            prefixes = [(blocks, named.found) for blocks, named in ends]
            listed = available.shortlist(self._with_files(prefixes, block_hashes), turn)
            workers, hits = listed.values(), hits_among(ends, listed.keys())
        hits = self._behind_windows(hits, block_hashes)
        found, rates_of = hits.found, self.rates.of
        views = [
            view
            if (view := worker.view) is not None and view.rates is rates_of(worker.endpoint)
            else self._view(worker)
            for worker in workers
        ]
        in_files = self._in_files(workers, found, block_hashes) if self.tiers.directories else _NO_FILES
        shown = {**found, **in_files} if in_files else found
        if shown:
            for index, worker in enumerate(workers):
                if worker.endpoint in shown:
                    views[index] = self._view_with_hits(worker, hits, in_files, block_hashes)
        return tuple(views)

    def _behind_windows(self, hits: Hits, block_hashes: Sequence[bytes]) -> Hits:
        """Return the hits; for models with sliding-window layers, without blocks whose window is not cached.

        If a prompt in flight will cache a block, the block's window is assumed to be cached.
        """
        windowed = [(each, groups) for each in hits.ready if (groups := self._groups(each)).windowed]
        if not windowed:
            return hits
        found, ready = dict(hits.found), dict(hits.ready)
        for endpoint, groups in windowed:
            raw = ready.pop(endpoint)
            blocks = groups.known_columns(block_hashes[:raw], self.caches.index.ready(endpoint).__contains__)
            if found.get(endpoint) == raw:
                del found[endpoint]
            if blocks:
                ready[endpoint] = blocks
                found.setdefault(endpoint, blocks)
        return Hits(found, ready)

    def _groups(self, endpoint: str) -> BlockGroups:
        worker = self._workers.get(endpoint)
        return ONE_GROUP if worker is None or worker.description is None else worker.description.model.groups

    def _with_files(self, prefixes: Sequence[tuple[int, Sequence[str]]], block_hashes: Sequence[bytes]) -> Prefixes:
        """Add the workers that have parts of the prompt in files to those that have parts in their pools."""
        if not self.tiers.directories:
            return prefixes
        by_blocks = defaultdict[int, list[str]](list)
        for name, blocks in self.tiers.readers(block_hashes).items():
            by_blocks[blocks].append(name)
        return sorted(chain(prefixes, by_blocks.items()), key=lambda prefix: prefix[0], reverse=True)

    def _in_files(
        self, workers: Iterable[Worker], found: Mapping[str, int], block_hashes: Sequence[bytes]
    ) -> Mapping[str, int]:
        """Return, by worker that loads files now, the number of blocks in files that follow the blocks in its pool."""
        loading = [worker for worker in workers if worker.report is not None and worker.report.loads_files]
        return self.tiers.behind(block_hashes, {each.endpoint: found.get(each.endpoint, 0) for each in loading})

    @property
    def available(self) -> int:
        """Return the number of workers that take work now."""
        return len(self._find_available().workers)

    def charge(
        self, attempt_id: int, placement: Placement, request: PlacementRequest, block_hashes: Sequence[bytes]
    ) -> None:
        """Charge a placed attempt on its workers."""
        hit_tokens = placement.decode_hit_tokens if placement.prefill is None else placement.prefill_hit_tokens
        known_tokens = hit_tokens + placement.loaded_tokens
        uncached = request.prompt_tokens - known_tokens
        self._fan_out.placed(block_hashes, known_tokens // request.block_tokens)
        self._computes(placement.computing, uncached)
        # The worker has the first blocks: a turn of a long conversation adds only a few.
        self._expect(placement.computing, attempt_id, block_hashes[hit_tokens // request.block_tokens :], uncached)
        if placement.computes_for_others:
            self._charge(placement.computing, attempt_id, AttemptCharge(tokens=uncached, load_ms=placement.load_ms))
        if request.pooled and placement.computes_for_others:
            return
        tokens = request.prompt_tokens + request.choices * request.charged_answer_tokens
        own_tokens = 0 if placement.prefill is not None else uncached
        load_ms = 0.0 if placement.prefill is not None else placement.load_ms
        blocks = 0 if request.pooled else request.charged_blocks
        decode = AttemptCharge(tokens, blocks, request.choices, prompt_tokens=own_tokens, load_ms=load_ms)
        self._charge(placement.decode, attempt_id, decode)

    def own_loads(self) -> dict[str, WorkerLoad]:
        """Return the sums of this router's charges by worker, which are sent to the other routers."""
        return {
            worker.endpoint: WorkerLoad(
                requests=len(worker.charges),
                tokens=worker.charges.tokens,
                blocks=worker.charges.blocks,
                slots=worker.charges.slots,
            )
            for worker in self._workers.values()
            if worker.charges
        }

    def others_have(self, loads: Mapping[str, WorkerLoad]) -> None:
        """Set the sums of the other routers' charges by worker."""
        if loads != self._peer_loads:
            self._peer_loads = loads
            self._forget_views()

    def predicted_elsewhere(self, endpoint: str, block_hashes: Sequence[bytes], computed_tokens: int) -> None:
        """Record another router's placement of a prompt. The worker may be unknown to this router."""
        worker = self._workers.get(endpoint)
        if worker is not None and worker.held and worker.description is not None:
            self._computes(endpoint, computed_tokens)
            self.caches.index.expect_elsewhere(endpoint, block_hashes)

    def answered(self, endpoint: str, block_hashes: Sequence[bytes]) -> None:
        """Mark the blocks of a complete answer and its prompt as cached, if the worker does not report its cache.

        The worker may be gone.
        """
        worker = self._workers.get(endpoint)
        if worker is not None and worker.held and worker.description is not None:
            self.caches.assume(endpoint, block_hashes, worker.description.total_blocks)
            self._fan_out.ended(block_hashes)

    def prompt_computed(self, attempt_id: int, endpoint: str) -> None:
        """Record that a decode worker has computed the attempt's prompt."""
        worker = self._workers.get(endpoint)
        if worker is not None:
            worker.charges.prompt_computed(attempt_id)
            worker.changed()

    def release(self, attempt_id: int, endpoint: str) -> None:
        """Release an attempt's charge on a worker.

        The worker may be gone, or the charge may have been released already.
        """
        worker = self._workers.get(endpoint)
        if worker is None:
            return
        worker.charges.release(attempt_id)
        worker.changed()
        missing = self.caches.index.settle(endpoint, attempt_id)
        if missing and worker.held and worker.description is not None:
            self.caches.assume(endpoint, missing, worker.description.total_blocks)

    def _forget(self, endpoint: str) -> None:
        """Forget the cache, files, rates and recent work of a worker whose process is gone."""
        self.caches.forget(endpoint)
        self.tiers.forget(endpoint)
        self.rates.forget(endpoint)
        self.pairs.forget(endpoint)
        self._recent.forget(endpoint)

    def _computes(self, endpoint: str, tokens: int) -> None:
        peers = self._find_available().by_role[self._workers[endpoint].role]
        self._recent.add(endpoint, tokens, max(1, len(peers)) * self.rates.of(endpoint).prefill_tokens_per_s)
        self._workers[endpoint].changed()

    def _charge(self, endpoint: str, attempt_id: int, charge: AttemptCharge) -> None:
        worker = self._workers[endpoint]
        worker.charges.add(attempt_id, charge)
        worker.changed()

    def _expect(self, endpoint: str, attempt_id: int, block_hashes: Sequence[bytes], computed_tokens: int) -> None:
        """Expect the prompt's blocks at the worker that will compute them, so that equal prompts are placed there."""
        self.caches.index.expect(endpoint, attempt_id, block_hashes)
        self.predictions.add(endpoint, block_hashes, computed_tokens)

    def _find_available(self) -> AvailableWorkers:
        if self._available is None:
            workers = {name: worker for name, worker in self._workers.items() if worker.available}
            by_role = {role: tuple(name for name in workers if workers[name].role is role) for role in WorkerRole}
            known = {role: frozenset(names) for role, names in by_role.items()}
            self._available = AvailableWorkers(workers, by_role, known)
        return self._available

    def _forget_old_views(self) -> None:
        """Drop the cached views if recent work has decayed since they were created."""
        if self._recent.age - self._seen_age > LATEST_AGE:
            self._seen_age = self._recent.age
            self._forget_views()

    def _forget_views(self) -> None:
        for worker in self._workers.values():
            worker.changed()

    def _view(self, worker: Worker) -> WorkerView:
        worker.view = self._make_view(worker)
        return worker.view

    def _view_with_hits(
        self, worker: Worker, hits: Hits, in_files: Mapping[str, int], block_hashes: Sequence[bytes]
    ) -> WorkerView:
        """Return the worker's view for this prompt.

        The view for the last prompt is reused if the counts are equal: similar prompts often follow each other.
        """
        endpoint, view = worker.endpoint, worker.hit_view
        hit_blocks, ready_blocks = hits.found.get(endpoint, 0), hits.ready.get(endpoint, 0)
        tier_blocks = in_files.get(endpoint, 0)
        branches = self._fan_out.behind(block_hashes, hit_blocks + tier_blocks)
        counts = (hit_blocks, ready_blocks, branches, tier_blocks)
        seen = view is not None and (view.hit_blocks, view.ready_blocks, view.branches, view.tier_blocks)
        if view is None or seen != counts or view.rates is not self.rates.of(endpoint):
            view = worker.hit_view = self._make_view(worker, *counts)
        return view

    def _make_view(
        self, worker: Worker, hit_blocks: int = 0, ready_blocks: int = 0, branches: int = 0, tier_blocks: int = 0
    ) -> WorkerView:
        """Create the worker's view for a placement decision. The four counts describe one prompt."""
        endpoint, description, report, charges = worker.endpoint, worker.description, worker.report, worker.charges
        if description is None or report is None:
            raise RuntimeError(f"cannot place on {endpoint}: it has sent no description or no report")
        peers = self._peer_loads.get(endpoint, NOTHING)
        tier = report.tier if tier_blocks else None
        return WorkerView(
            endpoint=endpoint,
            role=worker.role,
            fingerprint=description.fingerprint,
            total_blocks=description.total_blocks,
            total_slots=description.total_slots,
            limit_blocks=report.limit_blocks,
            limit_slots=report.limit_slots,
            used_blocks=charges.blocks,
            used_slots=charges.slots,
            tokens_in_flight=charges.tokens + peers.tokens,
            hit_blocks=hit_blocks,
            adapters=description.adapters,
            ready_blocks=ready_blocks,
            elsewhere_slots=peers.slots,
            # Both counts are too low: reports lack prompts that were just sent, charges lack other routers' prompts.
            pending_prompt_tokens=max(report.pending_tokens, charges.prompt_tokens),
            recent_tokens=self._recent.of(endpoint),
            rates=self.rates.of(endpoint),
            branches=branches,
            tier_blocks=tier_blocks,
            tier_block_bytes=0 if tier is None else tier.block_bytes,
            load_bytes_per_s=0.0 if tier is None else tier.load_bytes_per_s,
            loading_ms=charges.load_ms,
            protocol=description.versions.protocol,
            has_own_weights=description.has_own_weights,
        )
