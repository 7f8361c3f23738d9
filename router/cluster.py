"""The router's view of its workers: who is connected, what they report, what this router has on them. Pure state.

Workers are named by endpoint. A charge is taken when a request is placed and returned exactly once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from router.placement import Placement, PlacementRequest, WorkerView
from router.prefix_index import PrefixIndex
from router.worker import WorkerDescription, WorkerReport, WorkerRole


@dataclass(slots=True)
class Worker:
    """One endpoint. `description` and `epoch` stay as last seen while it is not connected."""

    endpoint: str
    role: WorkerRole
    connected: bool = False
    held: bool = False  # a session is up, or in its grace: requests on it may go on
    description: WorkerDescription | None = None
    epoch: int = 0
    report: WorkerReport | None = None
    charges: dict[int, "Charge"] = field(default_factory=dict)  # by attempt id


@dataclass(frozen=True, slots=True)
class Charge:
    """What one attempt takes up on one worker."""

    tokens: int
    blocks: int = 0
    slots: int = 0


class Cluster:
    """All workers that membership names. Every change of it goes through a method."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._roles_seen: set[WorkerRole] = set()
        self._prefixes = PrefixIndex()

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple(self._workers.values())

    @property
    def roles_seen(self) -> frozenset[WorkerRole]:
        """The roles that membership ever named."""
        return frozenset(self._roles_seen)

    def add(self, endpoint: str, role: WorkerRole) -> None:
        self._roles_seen.add(role)
        self._workers[endpoint] = Worker(endpoint, role)

    def remove(self, endpoint: str) -> None:
        self._workers.pop(endpoint, None)
        self._prefixes.forget(endpoint)

    def connected(self, endpoint: str, description: WorkerDescription, epoch: int) -> None:
        worker = self._workers[endpoint]
        if epoch != worker.epoch:
            self._prefixes.forget(endpoint)
            worker.report = None
        worker.connected = worker.held = True
        worker.description, worker.epoch = description, epoch
        worker.role = description.role

    def disconnected(self, endpoint: str) -> None:
        """The connection broke; the worker takes no new work until it is back."""
        if endpoint in self._workers:
            self._workers[endpoint].connected = False

    def lost(self, endpoint: str) -> None:
        """Nothing that was sent there will be answered."""
        worker = self._workers.get(endpoint)
        if worker is not None:
            worker.connected = worker.held = False
            worker.report = None
            worker.charges.clear()

    def reported(self, endpoint: str, report: WorkerReport) -> None:
        self._workers[endpoint].report = report

    def find(self, endpoint: str) -> Worker | None:
        return self._workers.get(endpoint)

    def snapshot(self, block_hashes: Sequence[bytes]) -> tuple[WorkerView, ...]:
        """The workers that take work now, with what they probably hold of this prompt."""
        return tuple(
            self._view(worker, description, report, block_hashes)
            for worker in self._workers.values()
            if worker.connected
            and (description := worker.description) is not None
            and (report := worker.report) is not None
            and not report.draining
        )

    def charge(
        self, attempt_id: int, placement: Placement, request: PlacementRequest, block_hashes: Sequence[bytes]
    ) -> None:
        """The attempt is dispatched: it counts from now on."""
        if placement.prefill is not None:
            uncached = request.prompt_tokens - placement.prefill_hit_tokens
            self._charge(placement.prefill, attempt_id, Charge(tokens=uncached), block_hashes)
        tokens = request.prompt_tokens + request.choices * request.charged_answer_tokens
        decode = Charge(tokens=tokens, blocks=request.charged_blocks, slots=request.choices)
        self._charge(placement.decode, attempt_id, decode, block_hashes)

    def answered(self, endpoint: str, block_hashes: Sequence[bytes]) -> None:
        """A decode worker made these blocks, those of the prompt included. It may be gone since."""
        worker = self._workers.get(endpoint)
        if worker is not None and worker.held and worker.description is not None:
            self._prefixes.record(endpoint, block_hashes, worker.description.total_blocks, ready=True)

    def release(self, attempt_id: int, endpoint: str) -> None:
        """The attempt takes up nothing more on this worker. The worker may be gone, or the charge returned before."""
        worker = self._workers.get(endpoint)
        if worker is not None:
            worker.charges.pop(attempt_id, None)

    def _charge(self, endpoint: str, attempt_id: int, charge: Charge, block_hashes: Sequence[bytes]) -> None:
        worker = self._workers[endpoint]
        worker.charges[attempt_id] = charge
        if worker.description is not None:
            self._prefixes.record(endpoint, block_hashes, worker.description.total_blocks)

    def _view(
        self, worker: Worker, description: WorkerDescription, report: WorkerReport, block_hashes: Sequence[bytes]
    ) -> WorkerView:
        charges = worker.charges.values()
        return WorkerView(
            endpoint=worker.endpoint,
            role=worker.role,
            fingerprint=description.fingerprint,
            total_blocks=description.total_blocks,
            total_slots=description.total_slots,
            limit_blocks=report.limit_blocks,
            limit_slots=report.limit_slots,
            used_blocks=sum(charge.blocks for charge in charges),
            used_slots=sum(charge.slots for charge in charges),
            tokens_in_flight=sum(charge.tokens for charge in charges),
            hit_blocks=self._prefixes.hit_blocks(worker.endpoint, block_hashes),
            adapters=description.adapters,
            ready_blocks=self._prefixes.ready_blocks(worker.endpoint, block_hashes),
        )
