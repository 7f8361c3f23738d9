"""Clusters whose workers have connected and reported, for tests of what a router decides."""

from collections.abc import Mapping
from typing import Any

from baton.process.registry.worker_record import WorkerRole
from baton.router.placement.cluster import Cluster
from baton.router.types.worker import ModelDescription, PoolBlocks, WorkerDescription, WorkerReport

MODEL = ModelDescription("m", "/m", 1000, 100, "float32", 4)
BOTH = (WorkerRole.PREFILL, WorkerRole.DECODE)


def described(name: str, role: WorkerRole, **changes: Any) -> WorkerDescription:
    """A worker of 100 blocks of 4 tokens, and 8 slots."""
    fields: dict[str, Any] = {"pid": 1, "fingerprint": b"f", "model": MODEL, "total_blocks": 100, "total_slots": 8}
    return WorkerDescription(name, role, **(fields | changes))


def reported(blocks: int = 100, slots: int = 8, **changes: Any) -> WorkerReport:
    """An idle worker that lends all of itself."""
    fields: dict[str, Any] = {"waiting_requests": 0, "running_sequences": 0, "pending_tokens": 0}
    fields |= {"pages": PoolBlocks(blocks, blocks, 0, 0, 0, 0), "draining": False, "steps": 0}
    return WorkerReport(blocks, slots, **(fields | changes))


def join(cluster: Cluster, endpoint: str, role: WorkerRole, epoch: int = 1, slots: int = 8, **changes: Any) -> None:
    """`changes`: of its description, whose name is the endpoint."""
    if cluster.find(endpoint) is None:
        cluster.add(endpoint, role)
    description = described(endpoint, role, **changes)
    cluster.connected(endpoint, description, epoch)
    cluster.reported(endpoint, reported(description.total_blocks, slots))


def cluster_of(workers: Mapping[str, WorkerRole], slots: int = 8, **changes: Any) -> Cluster:
    cluster = Cluster()
    for endpoint, role in workers.items():
        join(cluster, endpoint, role, slots=slots, **changes)
    return cluster
