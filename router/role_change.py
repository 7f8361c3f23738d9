"""Whether a worker may change its role now: never the last worker of a role. Pure."""

from collections.abc import Sequence

from router.cluster import Worker
from router.worker import WorkerRole
from service.errors import FailedPrecondition, NotFound


def serves(worker: Worker) -> bool:
    """It takes work in its role now."""
    return worker.connected and worker.report is not None and not worker.report.draining


def endpoint_to_change(workers: Sequence[Worker], worker_id: str, role: WorkerRole) -> str | None:
    """The worker's endpoint; None where it has that role already. Raises: NotFound, FailedPrecondition."""
    worker = next((each for each in workers if each.description and each.description.worker_id == worker_id), None)
    if worker is None or worker.description is None:
        raise NotFound("worker", worker_id)
    if worker.role is role:
        return None
    if role not in worker.description.roles:
        raise FailedPrecondition("role", f"{worker_id} cannot change its role")
    if not serves(worker):
        raise FailedPrecondition("worker_id", f"{worker_id} is not connected, or is draining already")
    if not _others_of_its_role(workers, worker):
        raise FailedPrecondition("role", f"{worker_id} is the only {worker.role} worker")
    return worker.endpoint


def _others_of_its_role(workers: Sequence[Worker], worker: Worker) -> bool:
    model = worker.description.fingerprint if worker.description else None
    return any(
        other is not worker
        and other.role is worker.role
        and serves(other)
        and other.description is not None
        # those of another model are no help
        and other.description.fingerprint == model
        for other in workers
    )
