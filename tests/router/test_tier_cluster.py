"""A cluster whose workers have files: what a placement is shown of them, and when nothing."""

from collections.abc import Iterator

import pytest

from baton.process.registry.worker_record import WorkerRole
from baton.router.cache.replica import CacheSnapshotPart, CacheUpdate
from baton.router.cache.tiers import TierChanges, TierPiece, TierSnapshotPart
from baton.router.placement.cluster import ALL_UP_TO, Cluster
from tests.fixtures.tier_reports import tier_report
from tests.router import clusters
from tests.router.clusters import reported
from tests.router.test_caches import HASHES, dispatch

ONE, TWO = b"1" * 16, b"2" * 16
SLOTS = b"".join(each[:8] for each in HASHES)


def join(cluster: Cluster, endpoint: str, role: WorkerRole, directory: bytes, epoch: int = 1) -> None:
    clusters.join(cluster, endpoint, role, epoch)
    cluster.caches.take_snapshot(endpoint, CacheSnapshotPart(0, 0, 1, ()), now=0.0)
    report(cluster, endpoint, directory)
    cluster.tiers.take_snapshot(endpoint, TierSnapshotPart(0, 0, 1))


def report(cluster: Cluster, endpoint: str, directory: bytes, reads: bool = True) -> None:
    tier = tier_report(directory, reads=reads)
    cluster.reported(endpoint, reported(tier=tier))
    cluster.tiers.check(endpoint, cluster.name_of(endpoint), tier, now=0.0)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """p0 and d0 share a directory; p1 has another one. p0's files have all of a prompt."""
    cluster = Cluster()
    join(cluster, "p0", WorkerRole.PREFILL, ONE)
    join(cluster, "p1", WorkerRole.PREFILL, TWO)
    join(cluster, "d0", WorkerRole.DECODE, ONE)
    cluster.tiers.take_changes("p0", TierChanges(1, (TierPiece(1, 0, SLOTS),)), 0.0)
    cluster.rates.computed("p0", 100, 1000.0)  # so slowly that loading is sooner
    yield cluster


def in_files(cluster: Cluster) -> dict[str, int]:
    return {view.endpoint: view.tier_blocks for view in cluster.snapshot(HASHES) if view.tier_blocks}


def test_workers_of_a_directory_share_its_blocks(cluster: Cluster) -> None:
    assert in_files(cluster) == {"p0": 4, "d0": 4}
    view = next(view for view in cluster.snapshot(HASHES) if view.endpoint == "d0")
    assert (view.tier_block_bytes, view.load_bytes_per_s) == (1000, 1e9)
    assert cluster.snapshot([b"z" * 32])[0].tier_blocks == 0


def test_tier_that_a_failing_disk_has_turned_off_is_not_shown_at_that_worker(cluster: Cluster) -> None:
    report(cluster, "p0", ONE, reads=False)
    assert in_files(cluster) == {"d0": 4}
    report(cluster, "p0", ONE)
    assert in_files(cluster) == {"p0": 4, "d0": 4}


def test_blocks_also_in_the_pool_count_once_and_outlive_their_eviction(cluster: Cluster) -> None:
    cluster.caches.take_changes("p0", CacheUpdate(1, tuple(HASHES[:3]), ()), now=0.0)
    assert in_files(cluster) == {"p0": 1, "d0": 4}
    cluster.caches.take_changes("p0", CacheUpdate(2, (), tuple(HASHES[:3])), now=0.0)
    assert in_files(cluster) == {"p0": 4, "d0": 4}


def test_dead_worker_leaves_its_files_to_its_directory(cluster: Cluster) -> None:
    cluster.remove("p0")
    assert in_files(cluster) == {"d0": 4}
    cluster.remove("d0")
    join(cluster, "d0", WorkerRole.DECODE, ONE)
    assert in_files(cluster) == {}


def test_restarted_worker_is_shown_again_after_it_announced_its_files(cluster: Cluster) -> None:
    cluster.remove("d0")
    join(cluster, "p0", WorkerRole.PREFILL, ONE, epoch=2)
    assert in_files(cluster) == {}
    cluster.tiers.take_changes("p0", TierChanges(1, (TierPiece(1, 0, SLOTS),)), 0.0)
    assert in_files(cluster) == {"p0": 4}


def test_loaded_blocks_are_free_and_count_as_cached_afterwards(cluster: Cluster) -> None:
    first = dispatch(cluster, 1)
    assert (first.prefill, first.prefill_hit_tokens, first.loaded_tokens) == ("p0", 0, 16)
    worker = cluster.find("p0")
    assert worker is not None and worker.charges.tokens == 2
    assert worker.charges.load_ms == first.load_ms > 0.0
    assert {view.endpoint: view.loading_ms for view in cluster.snapshot(HASHES)}["p0"] == first.load_ms
    second = dispatch(cluster, 2)
    assert (second.prefill, second.prefill_hit_tokens, second.loaded_tokens) == ("p0", 16, 0)
    cluster.release(1, "p0")
    assert worker.charges.load_ms == 0.0


def test_workers_with_the_prompt_are_always_candidates() -> None:
    cluster = Cluster()
    for number in range(ALL_UP_TO + 40):
        join(cluster, f"p{number}", WorkerRole.PREFILL, TWO if number else ONE)
    cluster.tiers.take_changes("p0", TierChanges(1, (TierPiece(1, 0, SLOTS),)), 0.0)
    looked_at = cluster.snapshot(HASHES, turn=1)
    assert len(looked_at) < 60
    assert {view.endpoint: view.tier_blocks for view in looked_at if view.tier_blocks} == {"p0": 4}
