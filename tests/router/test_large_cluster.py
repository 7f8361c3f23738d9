"""A large cluster: decisions look at few workers, find prefixes wherever they lie, and room wherever there is some."""

from baton.process.registry.worker_record import WorkerRole
from baton.router.admission.queue import AdmissionQueue
from baton.router.placement.cluster import HOLDERS, OTHERS, Cluster
from baton.router.placement.policies import Strategy
from baton.router.types.placement import PlacementRequest
from baton.router.types.worker import ModelDescription, PoolBlocks, WorkerDescription, WorkerReport
from tests.fixtures.router_defaults import DEFAULT_LIMITS, make_policy
from tests.router.test_admission import admit

F = b"f" * 32
HASHES = tuple(bytes([number]) * 32 for number in range(8))
REQUEST = PlacementRequest(F, 32, 320, 16, 1, turn=3)
WORKERS = 200


def large_cluster(slots_of_last: int = 8, slots: int = 8) -> Cluster:
    cluster = Cluster()
    model = ModelDescription("m", "", 4096, 100, "float32", 32)
    for role in WorkerRole:
        for number in range(WORKERS):
            name = f"{role[0]}{number}"
            own = slots_of_last if number == WORKERS - 1 else slots
            cluster.add(name, role)
            cluster.connected(name, WorkerDescription(name, role, 1, F, model, 1000, 8), epoch=1)
            cluster.reported(name, WorkerReport(1000, own, PoolBlocks(1000, 1000, 0, 0, 0, 0), 0, 0, 0, False, 0))
    return cluster


def queue_of(cluster: Cluster) -> AdmissionQueue:
    return AdmissionQueue(cluster, DEFAULT_LIMITS, make_policy(strategy=Strategy.CACHE_AWARE))


async def test_who_has_the_prefix_is_found_among_all() -> None:
    cluster = large_cluster()
    cluster.caches.assume("p177", HASHES, 1000)
    admitted = await admit(queue_of(cluster), 1, REQUEST, HASHES)
    assert admitted.placement.prefill == "p177"
    assert len(admitted.decision.workers) <= 2 * (HOLDERS + OTHERS)


async def test_the_one_worker_with_room_is_found_though_it_was_not_looked_at() -> None:
    cluster = large_cluster(slots=0)
    assert all(view.endpoint != "d199" for view in cluster.snapshot(HASHES, turn=REQUEST.turn))
    admitted = await admit(queue_of(cluster), 1, REQUEST, HASHES)
    assert admitted.placement.decode == "d199"


def test_workers_that_drain_or_go_are_not_looked_at() -> None:
    cluster = large_cluster()
    pages = PoolBlocks(1000, 1000, 0, 0, 0, 0)
    cluster.reported("p0", WorkerReport(1000, 8, pages, 0, 0, 0, True, 0))
    cluster.disconnected("p1")
    cluster.lost("p2")
    cluster.remove("p3")
    assert cluster.available == 2 * WORKERS - 4
    assert not {"p0", "p1", "p2", "p3"} & {view.endpoint for view in cluster.snapshot(())}
    cluster.reported("p0", WorkerReport(1000, 8, pages, 0, 0, 0, False, 0))
    assert cluster.available == 2 * WORKERS - 3
