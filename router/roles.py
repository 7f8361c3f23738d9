"""Role planning of one router: measures the load pressure of both roles and carries out the planner's verdicts.

The pressures also give the desired number of workers of each role, for an autoscaler.

Pressure of prefill: the maximum of the workers' utilisation (by this router's requests, or by the tokens of all
routers), the queueing time of prompts, and the TTFT on the workers, each relative to its allowed value.

Pressure of decode: the maximum of used slots, used blocks, and the time between tokens, each relative to its allowed
value. Pending requests count as used slots. A request has a slot from its placement on: those whose prompts are being
computed count, those whose prompts wait do not.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from baton.process.errors import BatonError
from baton.process.objectives import LatencyObjectives
from baton.process.registry.worker_record import WorkerRole
from baton.router.admission.queue import AdmissionQueue
from baton.router.fleet.fleet import WorkerLinks
from baton.router.fleet.peers import is_cancelled
from baton.router.placement.cluster import Cluster, LinkEnd, Worker
from baton.router.placement.planner import RETURN_S, Planner, PlannerVerdict, Pressure, Situation, serves
from baton.router.placement.replicas import Replicas
from baton.router.trace.record import RequestRecord

logger = logging.getLogger(__name__)
PERIOD_S = 0.5
WINDOW_S = 10.0
PREFILL_SHARE = 0.8  # maximum utilisation of prefill workers, above which prompts queue up
RECOVER_S = 60.0  # time in which the desired number of workers must clear the backlog
DECODE_SHARE = 0.9  # maximum utilisation of decode workers' batch slots and blocks
LEAST_SAMPLES = 4
_MAX_SAMPLES = 4096


@dataclass(frozen=True, slots=True)
class _Ended:
    """Measured times of one completed request."""

    at_s: float  # time of completion, monotonic seconds
    computed_tokens: int
    prefill_ms: float
    waited_ms: float  # time that the prompt spent on its worker without being computed
    tbt_ms: float | None


class TokenFlow:
    """Rate of uncached prompt tokens at all prefill workers over the last WINDOW_S, from worker reports."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Mapping[str, int]]] = deque()

    def take(self, workers: Sequence[Worker], now: float) -> None:
        counts = {
            worker.endpoint: worker.report.cache_query_tokens - worker.report.cache_hit_tokens
            for worker in workers
            if worker.report is not None
        }
        self._seen.append((now, counts))
        while now - self._seen[0][0] > WINDOW_S:
            self._seen.popleft()

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second in the window; 0 with fewer than two samples. New and restarted workers do not count."""
        if len(self._seen) < 2:
            return 0.0
        (began_s, first), (ended_s, last) = self._seen[0], self._seen[-1]
        tokens = sum(max(0, count - first.get(endpoint, count)) for endpoint, count in last.items())
        return tokens / (ended_s - began_s) if ended_s > began_s else 0.0


class LostWorkers:
    """Workers that were lost within RETURN_S without a drain and have not returned."""

    def __init__(self) -> None:
        self._serving: dict[str, WorkerRole] = {}
        self._lost: dict[str, tuple[WorkerRole, float]] = {}

    def take(self, workers: Sequence[Worker], now: float) -> Counter[WorkerRole]:
        """Record the present workers, and return the number of lost ones by role."""
        connected = {each.endpoint for each in workers if each.connected or each.end is LinkEnd.ANNOUNCED}
        self._lost |= {name: (role, now) for name, role in self._serving.items() if name not in connected}
        self._serving = {worker.endpoint: worker.role for worker in workers if serves(worker)}
        self._lost = {
            name: (role, at_s)
            for name, (role, at_s) in self._lost.items()
            if name not in connected and now - at_s < RETURN_S
        }
        return Counter(role for role, _ in self._lost.values())


class RolePlanning:
    """Role planning of one router. `may_act` returns whether this router may change roles now."""

    def __init__(
        self,
        mode: Literal["propose", "act"],
        objectives: LatencyObjectives,
        planner: Planner,
        cluster: Cluster,
        queue: AdmissionQueue,
        fleet: WorkerLinks,
        may_act: Callable[[], Awaitable[bool]],
        replicas: Replicas,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.mode = mode
        self.changes = 0
        self.verdict = PlannerVerdict(None, "no requests measured yet", 0.0, 0.0)
        self._objectives = objectives
        self._planner = planner
        self._cluster = cluster
        self._queue = queue
        self._fleet = fleet
        self._may_act = may_act
        self._replicas = replicas
        self._flow = TokenFlow()
        self._lost = LostWorkers()
        self._clock = clock or time.monotonic
        self._ended: deque[_Ended] = deque(maxlen=_MAX_SAMPLES)

    def observe(self, record: RequestRecord) -> None:
        """Add the measured times of a completed request. A prompt that a decode worker computed has no prefill time."""
        timeline = record.timeline
        prefill, gaps = timeline.prefill, record.gaps
        if prefill is None or timeline.placement is None or record.prepared is None:
            return
        computed = (
            len(record.prepared.token_ids) - prefill.cached_tokens if timeline.placement.computes_for_others else 0
        )
        busy_ms = sum(prefill.chunk_ms)
        waited_ms = max(0.0, prefill.total_ms - busy_ms)
        self._ended.append(_Ended(self._clock(), computed, busy_ms, waited_ms, gaps.p50_ms if gaps else None))

    @property
    def desired(self) -> Mapping[WorkerRole, int]:
        """Desired number of workers for each role that some worker has had."""
        return self._replicas.desired

    async def run(self) -> None:
        while not is_cancelled():
            await asyncio.sleep(PERIOD_S)
            await self.look()

    async def look(self) -> None:
        """Measure the cluster once, and change a worker's role if the planner says so."""
        now = self._clock()
        situation = self.situation()
        self._replicas.look(situation, now)
        verdict = self._planner.look(situation, now)
        if verdict.to is not self.verdict.to and verdict.to is not None:
            logger.info("planner: %s", verdict.why)
        self.verdict = verdict
        if verdict.to is None or self.mode != "act" or not await self._may_act():
            return
        worker_id = self._to_change(verdict.to)
        if worker_id is None:
            return
        try:
            self._fleet.change_role(worker_id, verdict.to)
        except BatonError as error:
            logger.info("planner: role change of worker %s failed: %s", worker_id, error)
            return
        self.changes += 1
        self._planner.changed(now)

    def situation(self) -> Situation:
        """Measure the present number of workers and the pressure of both roles."""
        now = self._clock()
        while self._ended and now - self._ended[0].at_s > WINDOW_S:
            self._ended.popleft()
        workers = [worker for worker in self._cluster.workers if serves(worker)]
        prefill = [worker for worker in workers if worker.role is WorkerRole.PREFILL]
        decode = [worker for worker in workers if worker.role is WorkerRole.DECODE]
        self._flow.take(prefill, now)
        moving = any(w.connected and w.report is not None and w.report.draining for w in self._cluster.workers)
        lost = self._lost.take(self._cluster.workers, now)
        return Situation(
            len(prefill),
            len(decode),
            self._prefill(prefill),
            self._decode(decode, len(prefill)),
            moving,
            lost[WorkerRole.PREFILL],
            lost[WorkerRole.DECODE],
        )

    def _prefill(self, workers: Sequence[Worker]) -> Pressure:
        computed = [each for each in self._ended if each.computed_tokens > 0 and each.prefill_ms > 0.0]
        if not workers or len(computed) < LEAST_SAMPLES:
            return Pressure(0.0)
        busy_ms = sum(each.prefill_ms for each in computed)
        tokens_per_ms = sum(each.computed_tokens for each in computed) / busy_ms
        pending_tokens = sum(worker.report.pending_tokens for worker in workers if worker.report)
        backlog_ms = pending_tokens / tokens_per_ms / len(workers)
        here = (busy_ms + pending_tokens / tokens_per_ms) / (WINDOW_S * 1e3) / len(workers)
        flow = self._flow.tokens_per_s / 1e3 / tokens_per_ms
        utilised = max(here, flow / len(workers))
        own_ms = _quantile([each.prefill_ms for each in computed], 0.5)
        there_ms = _quantile([each.prefill_ms + each.waited_ms for each in computed], 0.9)
        allowed_ms = self._objectives.ttft_ms
        level = max(utilised / PREFILL_SHARE, backlog_ms / allowed_ms, there_ms / allowed_ms)
        load = max(busy_ms / (WINDOW_S * 1e3), flow) / len(workers)
        shared = load + backlog_ms / (RECOVER_S * 1e3)
        return Pressure(level, own_ms / allowed_ms, shared / PREFILL_SHARE, load / PREFILL_SHARE)

    def _decode(self, workers: Sequence[Worker], prefill_workers: int) -> Pressure:
        if not workers:
            return Pressure(0.0)
        reports = [worker.report for worker in workers if worker.report is not None]
        slots = sum(worker.description.total_slots for worker in workers if worker.description)
        running = sum(report.running_sequences + report.waiting_requests for report in reports)
        placed = sum(worker.charges.slots for worker in workers)
        computed = min(prefill_workers, max(0, placed - running))  # requests whose prompts are being computed
        reserved = computed / (placed - running) if placed > running else 1.0  # counted part of reserved blocks
        held = sum(each.pages.held_by_sequences + reserved * each.pages.held_by_transfers for each in reports)
        pages = held / max(1, sum(report.pages.total for report in reports))
        occupied, pending = running + computed, float(self._queue.waiting)
        if placed > occupied:  # prompts wait for prefill workers, and so do pending requests, in proportion
            pending *= occupied / placed
        load = max(occupied / max(1, slots), pages) / DECODE_SHARE
        taken = max((occupied + pending) / max(1, slots), pages) / DECODE_SHARE
        gaps = [each.tbt_ms for each in self._ended if each.tbt_ms is not None]
        if len(gaps) < LEAST_SAMPLES:
            return Pressure(taken, shared=taken, load=load)
        level = max(taken, _quantile(gaps, 0.9) / self._objectives.tbt_ms)
        # The floor is the shortest token gap seen: more workers do not make steps shorter than that.
        return Pressure(level, 0.0 if level == taken else min(gaps) / self._objectives.tbt_ms, taken, load)

    def _to_change(self, to: WorkerRole) -> str | None:
        """Return the id of the least loaded worker that can change its role to `to`; None if there is none."""
        available = [
            worker
            for worker in self._cluster.workers
            if worker.role is not to and serves(worker) and worker.description and to in worker.description.roles
        ]
        chosen = min(available, key=lambda worker: worker.charges.tokens, default=None)
        return chosen.description.worker_id if chosen is not None and chosen.description is not None else None


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
