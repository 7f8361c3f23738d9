"""A large cluster: decisions look at few workers, find prefixes wherever they lie, and room wherever there is some."""

from baton.process.errors import BatonError
from baton.process.registry.worker_record import WorkerRole
from baton.router.admission.queue import AdmissionQueue, Admitted, RequestClass
from baton.router.placement.cluster import HOLDERS, OTHERS, Cluster
from baton.router.placement.decide import Placement, place
from baton.router.placement.policies import Strategy
from baton.router.types.placement import PlacementRequest
from tests.fixtures.router_defaults import DEFAULT_LIMITS, make_policy
from tests.router.clusters import cluster_of, reported

HASHES = tuple(bytes([number]) * 32 for number in range(8))
REQUEST = PlacementRequest(b"f", 4, 32, 16, 1, turn=3)
WORKERS = 200


def large_cluster(slots: int = 8) -> Cluster:
    """`slots`: of all decode workers but the last one, which has 8."""
    names = {f"{role[0]}{number}": role for role in WorkerRole for number in range(WORKERS)}
    cluster = cluster_of(names, slots, total_blocks=1000)
    cluster.reported("d199", reported(1000))
    return cluster


async def admitted(cluster: Cluster) -> Admitted:
    outcomes = list[Admitted | BatonError]()
    queue = AdmissionQueue(cluster, DEFAULT_LIMITS, make_policy(strategy=Strategy.CACHE_AWARE))
    queue.submit(1, REQUEST, HASHES, RequestClass(), outcomes.append)
    [outcome] = outcomes
    assert isinstance(outcome, Admitted)
    return outcome


async def test_worker_with_the_prefix_is_found_among_all() -> None:
    cluster = large_cluster()
    cluster.caches.assume("p177", HASHES, 1000)
    found = await admitted(cluster)
    assert found.placement.prefill == "p177"
    assert len(found.decision.workers) <= 2 * (HOLDERS + OTHERS)


async def test_one_worker_with_room_is_found_though_it_was_not_looked_at() -> None:
    cluster = large_cluster(slots=0)
    assert all(view.endpoint != "d199" for view in cluster.snapshot(HASHES, turn=REQUEST.turn))
    assert (await admitted(cluster)).placement.decode == "d199"


def test_workers_that_drain_or_go_are_not_looked_at() -> None:
    cluster = large_cluster()
    cluster.reported("p0", reported(1000, draining=True))
    cluster.disconnected("p1")
    cluster.lost("p2")
    cluster.remove("p3")
    assert cluster.available == 2 * WORKERS - 4
    assert not {"p0", "p1", "p2", "p3"} & {view.endpoint for view in cluster.snapshot(())}
    cluster.reported("p0", reported(1000))
    assert cluster.available == 2 * WORKERS - 3


def test_snapshot_shows_hits_of_all_workers_after_a_prefix_is_cached_everywhere() -> None:
    cluster = large_cluster()
    for worker in cluster.workers:
        cluster.caches.assume(worker.endpoint, HASHES[:4], 1000)
    cluster.caches.assume("p177", HASHES, 1000)
    for turn in range(20):
        views = cluster.snapshot(HASHES, turn)
        assert len(views) <= 2 * (HOLDERS + OTHERS)
        assert {view.endpoint: view.hit_blocks for view in views} == {
            view.endpoint: 8 if view.endpoint == "p177" else 4 for view in views
        }
        assert any(view.endpoint == "p177" for view in views)


def test_charge_expects_only_the_blocks_that_the_worker_lacks() -> None:
    cluster = cluster_of({"p0": WorkerRole.PREFILL, "d0": WorkerRole.DECODE}, total_blocks=1000)
    cluster.caches.assume("p0", HASHES[:5], 1000)
    placement = place(REQUEST, cluster.snapshot(HASHES, REQUEST.turn), make_policy(strategy=Strategy.CACHE_AWARE))
    assert isinstance(placement, Placement)
    cluster.charge(1, placement, REQUEST, HASHES)
    assert [each.block_hashes for each in cluster.predictions.take()] == [HASHES[5:]]
    assert cluster.caches.index.hits(HASHES).found == {"p0": 8}
