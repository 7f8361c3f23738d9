"""What the cluster makes of caches that tell of themselves, and of those that do not."""

from dataclasses import replace

import pytest

from baton.process.registry.worker_record import WorkerRole
from baton.router.cache.replica import CacheSnapshotPart, CacheUpdate
from baton.router.placement.cluster import Cluster
from baton.router.placement.decide import Placement, place
from baton.router.placement.policies import Strategy
from baton.router.types.placement import PlacementRequest
from baton.text.block_groups import BlockGroups
from tests.fixtures.router_defaults import make_policy
from tests.router.clusters import MODEL, cluster_of, join

REQUEST = PlacementRequest(fingerprint=b"f", block_tokens=4, prompt_tokens=18, max_tokens=6, choices=1)
POLICY = make_policy(strategy=Strategy.CACHE_AWARE)
HASHES = [bytes([number]) * 32 for number in range(1, 5)]


@pytest.fixture
def cluster() -> Cluster:
    """Two prefill workers and a decode worker; all report their caches, which are empty."""
    cluster = cluster_of({"p0": WorkerRole.PREFILL, "p1": WorkerRole.PREFILL, "d0": WorkerRole.DECODE})
    for endpoint in ("p0", "p1", "d0"):
        cluster.caches.take_snapshot(endpoint, CacheSnapshotPart(0, 0, 1, ()), now=0.0)
    return cluster


def dispatch(cluster: Cluster, attempt_id: int) -> Placement:
    placement = place(REQUEST, cluster.snapshot(HASHES), POLICY)
    assert isinstance(placement, Placement)
    cluster.charge(attempt_id, placement, REQUEST, HASHES)
    return placement


def test_burst_of_siblings_lands_together(cluster: Cluster) -> None:
    placements = [dispatch(cluster, attempt_id) for attempt_id in range(1, 5)]
    assert len({placement.prefill for placement in placements}) == 1
    assert [placement.prefill_hit_tokens for placement in placements] == [0, 16, 16, 16]
    assert [placement.prefill_ready_tokens for placement in placements] == [0, 0, 0, 0]


def test_landing_prompt_does_not_count_as_cached_on_decode(cluster: Cluster) -> None:
    dispatch(cluster, 1)
    assert dispatch(cluster, 2).decode_hit_tokens == 0
    cluster.caches.take_changes("d0", CacheUpdate(1, tuple(HASHES), ()), now=0.0)
    assert dispatch(cluster, 3).decode_hit_tokens == 16


def test_expected_blocks_of_a_failed_attempt_are_forgotten(cluster: Cluster) -> None:
    first = dispatch(cluster, 1)
    assert first.prefill is not None
    for endpoint in first.endpoints:
        cluster.release(1, endpoint)
    assert all(view.hit_blocks == 0 for view in cluster.snapshot(HASHES))


def test_reported_blocks_outlive_their_attempt_until_eviction(cluster: Cluster) -> None:
    first = dispatch(cluster, 1)
    assert first.prefill is not None
    cluster.caches.take_changes(first.prefill, CacheUpdate(1, tuple(HASHES), ()), now=0.0)
    cluster.release(1, first.prefill)
    assert {view.endpoint: view.ready_blocks for view in cluster.snapshot(HASHES)}[first.prefill] == 4
    cluster.caches.take_changes(first.prefill, CacheUpdate(2, (), tuple(HASHES[2:])), now=0.0)
    assert {view.endpoint: view.ready_blocks for view in cluster.snapshot(HASHES)}[first.prefill] == 2


def test_new_process_under_an_old_name_has_nothing(cluster: Cluster) -> None:
    cluster.caches.take_changes("p0", CacheUpdate(1, tuple(HASHES), ()), now=0.0)
    cluster.caches.audit("p0", 4, 4)
    join(cluster, "p0", WorkerRole.PREFILL, epoch=2)
    assert all(view.hit_blocks == 0 for view in cluster.snapshot(HASHES))
    status = cluster.caches.status("p0")
    assert status is not None and (status.follows, status.checked_requests) == (False, 0)


def test_worker_without_events_is_assumed_to_cache_its_prompts(cluster: Cluster) -> None:
    for endpoint in ("p0", "p1"):
        cluster.disconnected(endpoint)
        join(cluster, endpoint, WorkerRole.PREFILL)
    first = dispatch(cluster, 1)
    assert first.prefill is not None
    cluster.release(1, first.prefill)
    assert {view.endpoint: view.hit_blocks for view in cluster.snapshot(HASHES)}[first.prefill] == 4


def test_prefix_counts_up_to_its_last_cached_window() -> None:
    groups = BlockGroups(1, 1, window_tokens=4, block_tokens=4)
    cluster = cluster_of({"p0": WorkerRole.PREFILL}, model=replace(MODEL, groups=groups))
    told = (*HASHES[:3], groups.name(HASHES[1], 1))
    cluster.caches.take_snapshot("p0", CacheSnapshotPart(0, 0, 1, told), now=0.0)
    [view] = cluster.snapshot(HASHES)
    assert (view.ready_blocks, view.hit_blocks) == (2, 2)
    cluster.caches.take_changes("p0", CacheUpdate(1, (), (groups.name(HASHES[1], 1),)), now=0.0)
    [view] = cluster.snapshot(HASHES)
    assert (view.ready_blocks, view.hit_blocks) == (0, 0)
