"""The router's view of its workers: which are connected, their reports, this router's charges on them. Pure state.

Workers are named by endpoint. A charge is taken when a request is placed and returned exactly once.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from router.able import Able
from router.branching import Branching
from router.caches import Caches
from router.charges import Charge
from router.departures import Departures, End
from router.known_worker import Worker
from router.pairs import PairHealth
from router.placement import Placement, PlacementRequest, WorkerView
from router.prefix_index import Hits
from router.rates import RateLedger
from router.recent_work import RecentWork
from router.shared_view import NOTHING, ElsewhereLoad
from router.shortlist import ALL_UP_TO
from router.worker import WorkerDescription, WorkerReport, WorkerRole

__all__ = ["Cluster", "Worker"]

LATEST_AGE = 0.05
"""A view may be so old, in windows of the newest work: by then a worker's share of that has faded by as much."""

KEPT_NAMES = 1024
"""A failed attempt is explained when its worker is gone, or has come back at another endpoint."""


class Cluster:
    """All workers that membership names. Every change of it goes through a method."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._roles_seen: set[WorkerRole] = set()
        self.caches = Caches()
        self.pairs = PairHealth()
        self.departures: defaultdict[str, Departures] = defaultdict(Departures)
        """By worker's name, as this router noticed them."""
        self._elsewhere: Mapping[str, ElsewhereLoad] = {}
        self._names: dict[str, str] = {}  # by endpoint, of workers that may be gone
        self.rates = RateLedger()
        """All measurements of the workers are kept here."""
        self._able: Able[Worker] | None = None  # None: to be found out
        self._recent, self._branching = RecentWork(), Branching()
        self._seen_rates, self._seen_age = 0, 0.0  # of the ledgers, when the oldest of the views was made
        self.on_predicted: Callable[[str, Sequence[bytes], int], None] = _tell_nobody
        """Called with the worker, the blocks of a prompt placed there, and how many of its tokens are computed."""

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple(self._workers.values())

    @property
    def roles_seen(self) -> frozenset[WorkerRole]:
        """The roles that membership ever named."""
        return frozenset(self._roles_seen)

    def add(self, endpoint: str, role: WorkerRole) -> None:
        self._roles_seen.add(role)
        self._able = None
        self._workers[endpoint] = Worker(endpoint, role)

    def remove(self, endpoint: str) -> None:
        self._able = None
        self._workers.pop(endpoint, None)
        self._forget(endpoint)

    def connected(self, endpoint: str, description: WorkerDescription, epoch: int) -> None:
        worker = self._workers[endpoint]
        if epoch != worker.epoch:
            self._forget(endpoint)
            worker.report = None
            if worker.description is not None:
                self.departures[worker.description.worker_id].follow(worker.end, worker.description, description)
        worker.end = End.NONE
        self.caches.connected(endpoint)
        worker.connected = worker.held = True
        worker.description, worker.epoch = description, epoch
        worker.role = description.role
        self._able = None
        worker.changed()
        self._names.pop(endpoint, None)
        self._names[endpoint] = description.worker_id
        if len(self._names) > KEPT_NAMES:
            del self._names[next(iter(self._names))]

    def disconnected(self, endpoint: str) -> None:
        """The connection broke; the worker takes no new work until it is back."""
        if endpoint in self._workers:
            self._workers[endpoint].connected = False
            self._able = None
            self.caches.disconnected(endpoint)

    def lost(self, endpoint: str, end: End = End.CUT, now: float = 0.0) -> None:
        """Nothing that was sent there will be answered. `now`: monotonic seconds."""
        worker = self._workers.get(endpoint)
        if worker is not None:
            worker.died_s = now if end is End.GONE else worker.died_s
            drained = worker.report is not None and worker.report.draining and not worker.charges
            worker.end = self.departures[self.name_of(endpoint)].lost(end, drained)
            self._able = None
            worker.connected = worker.held = False
            worker.report = None
            worker.changed()
            worker.charges.clear()

    def reported(self, endpoint: str, report: WorkerReport) -> None:
        worker = self._workers[endpoint]
        if worker.report is None or worker.report.draining != report.draining:
            self._able = None
        if worker.report != report:
            worker.changed()
        worker.report = report

    def measure(self, endpoint: str, report: WorkerReport, now: float) -> None:
        """Takes in the worker's speed from a report; `now` is when it came."""
        worker = self._workers[endpoint]
        stalled = worker.progress.stalls(report, now)
        if stalled != worker.stalled:
            worker.stalled, self._able = stalled, None
        self.rates.linked(endpoint, {link.endpoint: link.gb_per_s for link in report.links})
        if worker.role is WorkerRole.DECODE:
            tokens = worker.charges.tokens
            self.rates.told(endpoint, report.alone_tokens_per_s, report.beside_tokens_per_s)
            self.rates.reported(endpoint, report.steps, report.running_sequences > 0, tokens, now)

    def name_of(self, endpoint: str) -> str:
        """The worker's id, also of one that is gone; its endpoint where the id is unknown, or was forgotten."""
        worker = self._workers.get(endpoint)
        if worker is not None and worker.description is not None:
            return worker.description.worker_id
        return self._names.get(endpoint, endpoint)

    def find(self, endpoint: str) -> Worker | None:
        return self._workers.get(endpoint)

    def snapshot(self, block_hashes: Sequence[bytes], turn: int | None = None) -> tuple[WorkerView, ...]:
        """The workers that take work now, with the blocks of this prompt that they hold, or will when it comes.

        With a `turn`, which counts requests, only a shortlist (router/shortlist.py): all of a small cluster.
        """
        hits, able = self.caches.hits(block_hashes), self._find_able()
        self._forget_old_views()
        workers, found = able.workers, hits.found
        if turn is not None and len(workers) > ALL_UP_TO:
            names = [name for role in WorkerRole for name in able.shortlist(role, found, turn)]
            workers = tuple([self._workers[name] for name in names])
        views = [worker.view or self._view(worker) for worker in workers]
        if found:
            for place, worker in enumerate(workers):
                if worker.endpoint in found:
                    views[place] = self._view_with_hits(worker, hits, block_hashes)
        return tuple(views)

    @property
    def able(self) -> int:
        """How many workers take work now."""
        return len(self._find_able().roles)

    def charge(
        self, attempt_id: int, placement: Placement, request: PlacementRequest, block_hashes: Sequence[bytes]
    ) -> None:
        """The attempt is dispatched: it counts from now on."""
        known_tokens = placement.decode_hit_tokens if placement.prefill is None else placement.prefill_hit_tokens
        self._branching.placed(block_hashes, known_tokens // request.block_tokens)
        if placement.prefill is not None:
            uncached = request.prompt_tokens - placement.prefill_hit_tokens
            self._charge(placement.prefill, attempt_id, Charge(tokens=uncached))
            self._computes(placement.prefill, uncached)
            self._expect(placement.prefill, attempt_id, block_hashes, uncached)
        else:
            uncached = request.prompt_tokens - placement.decode_hit_tokens
            self._computes(placement.decode, uncached)
            self._expect(placement.decode, attempt_id, block_hashes, uncached)
        tokens = request.prompt_tokens + request.choices * request.charged_answer_tokens
        own_tokens = 0 if placement.prefill is not None else request.prompt_tokens - placement.decode_hit_tokens
        decode = Charge(tokens, request.charged_blocks, request.choices, prompt_tokens=own_tokens)
        self._charge(placement.decode, attempt_id, decode)

    def own_loads(self) -> dict[str, ElsewhereLoad]:
        """This router's charges by worker, as they are sent to the other routers."""
        return {
            worker.endpoint: ElsewhereLoad(
                requests=len(worker.charges),
                tokens=worker.charges.tokens,
                blocks=worker.charges.blocks,
                slots=worker.charges.slots,
            )
            for worker in self._workers.values()
            if worker.charges
        }

    def others_have(self, loads: Mapping[str, ElsewhereLoad]) -> None:
        """The other routers' charges by worker; replaces the earlier ones."""
        if loads != self._elsewhere:
            self._elsewhere = loads
            self._forget_views()

    def predicted_elsewhere(self, endpoint: str, block_hashes: Sequence[bytes], computed_tokens: int) -> None:
        """Another router has placed a prompt of these blocks there. The worker may not be known here."""
        worker = self._workers.get(endpoint)
        if worker is not None and worker.held and worker.description is not None:
            self._computes(endpoint, computed_tokens)
            self.caches.expect_elsewhere(endpoint, block_hashes)

    def answered(self, endpoint: str, block_hashes: Sequence[bytes]) -> None:
        """A decode worker made these blocks, those of the prompt included. It may be gone since.

        Used only where the worker does not report its cache itself.
        """
        worker = self._workers.get(endpoint)
        if worker is not None and worker.held and worker.description is not None:
            self.caches.assume(endpoint, block_hashes, worker.description.total_blocks)
            self._branching.ended(block_hashes)

    def prompt_computed(self, attempt_id: int, endpoint: str) -> None:
        """A decode worker has computed the attempt's prompt itself, and continues with the answer."""
        worker = self._workers.get(endpoint)
        if worker is not None:
            worker.charges.prompt_computed(attempt_id)
            worker.changed()

    def release(self, attempt_id: int, endpoint: str) -> None:
        """The attempt takes up nothing more on this worker. The worker may be gone, or the charge returned before."""
        worker = self._workers.get(endpoint)
        if worker is None:
            return
        worker.charges.give_back(attempt_id)
        worker.changed()
        missing = self.caches.settle(endpoint, attempt_id)
        if missing and worker.held and worker.description is not None:
            self.caches.assume(endpoint, missing, worker.description.total_blocks)

    def _forget(self, endpoint: str) -> None:
        """Its process is gone, and all that was known of it."""
        self.caches.forget(endpoint)
        self.rates.forget(endpoint)
        self.pairs.forget(endpoint)
        self._recent.forget(endpoint)

    def _computes(self, endpoint: str, tokens: int) -> None:
        alike = self._find_able().alike[self._workers[endpoint].role]
        self._recent.add(endpoint, tokens, max(1, len(alike)) * self.rates.of(endpoint).prefill_tokens_per_s)
        self._workers[endpoint].changed()

    def _charge(self, endpoint: str, attempt_id: int, charge: Charge) -> None:
        worker = self._workers[endpoint]
        worker.charges.add(attempt_id, charge)
        worker.changed()

    def _expect(self, endpoint: str, attempt_id: int, block_hashes: Sequence[bytes], computed_tokens: int) -> None:
        """The worker that computes the prompt will have its blocks: requests that come meanwhile wait for them."""
        self.caches.expect(endpoint, attempt_id, block_hashes)
        self.on_predicted(endpoint, block_hashes, computed_tokens)

    def _find_able(self) -> Able[Worker]:
        if self._able is None:
            self._able = Able.of(worker for worker in self._workers.values() if worker.able)
        return self._able

    def _forget_old_views(self) -> None:
        """Those made with other rates, or when a good deal less work had been given out."""
        if self.rates.version != self._seen_rates or self._recent.age - self._seen_age > LATEST_AGE:
            self._seen_rates, self._seen_age = self.rates.version, self._recent.age
            self._forget_views()

    def _forget_views(self) -> None:
        for worker in self._workers.values():
            worker.changed()

    def _view(self, worker: Worker) -> WorkerView:
        worker.view = self._make_view(worker)
        return worker.view

    def _view_with_hits(self, worker: Worker, hits: Hits, block_hashes: Sequence[bytes]) -> WorkerView:
        """The last one if it is still right: prompts of one conversation or document come one after another."""
        endpoint, view = worker.endpoint, worker.hit_view
        hit_blocks, ready_blocks = hits.found[endpoint], hits.ready.get(endpoint, 0)
        branches = self._branching.behind(block_hashes, hit_blocks)
        seen = view is not None and (view.hit_blocks, view.ready_blocks, view.branches)
        if view is None or seen != (hit_blocks, ready_blocks, branches):
            view = worker.hit_view = self._make_view(worker, hit_blocks, ready_blocks, branches)
        return view

    def _make_view(self, worker: Worker, hit_blocks: int = 0, ready_blocks: int = 0, branches: int = 0) -> WorkerView:
        elsewhere = self._elsewhere.get(worker.endpoint, NOTHING)
        recent_tokens, rates = self._recent.of(worker.endpoint), self.rates.of(worker.endpoint)
        return worker.seen(elsewhere, recent_tokens, rates, hit_blocks, ready_blocks, branches)


def _tell_nobody(endpoint: str, block_hashes: Sequence[bytes], computed_tokens: int) -> None:
    """There are no other routers."""
