"""Workers leave in several ways; a crash and an unannounced restart are deaths, the others are not."""

from dataclasses import replace

import pytest

from baton.process.registry.worker_record import WorkerRole
from baton.protos import session_pb2
from baton.router.placement.cluster import AttemptCharge, Cluster, Departures, LinkEnd
from tests.router.clusters import described, reported
from tests.router.conftest import Stack

DECODE = described("w", WorkerRole.DECODE, pool_id=b"first")
PREFILL = replace(DECODE, role=WorkerRole.PREFILL)
RESTARTED = replace(DECODE, pool_id=b"second")
WORKER = "127.0.0.1:1"


@pytest.fixture
def cluster() -> Cluster:
    """With one worker that is connected."""
    cluster = Cluster()
    cluster.add(WORKER, WorkerRole.DECODE)
    cluster.connected(WORKER, DECODE, 1)
    cluster.reported(WORKER, reported())
    return cluster


def drain(cluster: Cluster) -> None:
    cluster.reported(WORKER, reported(draining=True))


@pytest.mark.parametrize("drains", [True, False])
def test_change_of_role_is_no_death_despite_a_lost_session(cluster: Cluster, drains: bool) -> None:
    if drains:
        drain(cluster)
        cluster.lost(WORKER)
    cluster.connected(WORKER, PREFILL, 2)
    assert cluster.departures["w"] == Departures(role_changes=1)


def test_vanished_process_is_a_death(cluster: Cluster) -> None:
    cluster.lost(WORKER, LinkEnd.GONE, 5.0)
    cluster.connected(WORKER, RESTARTED, 2)
    assert cluster.departures["w"] == Departures(deaths=1)


def test_process_that_had_drained_did_not_die(cluster: Cluster) -> None:
    drain(cluster)
    cluster.lost(WORKER, LinkEnd.GONE, 5.0)
    cluster.connected(WORKER, RESTARTED, 2)
    assert cluster.departures["w"] == Departures(drains=1)


def test_process_with_open_requests_has_not_drained(cluster: Cluster) -> None:
    drain(cluster)
    worker = cluster.find(WORKER)
    assert worker is not None
    worker.charges.add(1, AttemptCharge(tokens=1))
    cluster.lost(WORKER, LinkEnd.GONE, 5.0)
    assert cluster.departures["w"] == Departures(deaths=1)


def test_silence_is_no_death_before_another_process_connects(cluster: Cluster) -> None:
    cluster.lost(WORKER)
    assert cluster.departures["w"] == Departures(lost_sessions=1)
    cluster.connected(WORKER, DECODE, 1)
    assert cluster.departures["w"] == Departures(lost_sessions=1)
    cluster.lost(WORKER)
    cluster.connected(WORKER, RESTARTED, 2)
    assert cluster.departures["w"] == Departures(lost_sessions=2, deaths=1)


def test_drained_process_that_another_one_follows_did_not_die(cluster: Cluster) -> None:
    drain(cluster)
    cluster.lost(WORKER)
    assert cluster.departures["w"] == Departures()
    cluster.connected(WORKER, RESTARTED, 2)
    assert cluster.departures["w"] == Departures(drains=1)


def test_silent_older_worker_counts_as_restarted() -> None:
    untold = replace(DECODE, pool_id=b"")
    assert not untold.is_same_process(untold)


async def seen(stack: Stack, **counts: int) -> None:
    """By the operator, of the decode worker."""
    await stack.until(
        lambda status: any(
            worker.worker.worker_id == "decode-0" and all(getattr(worker, name) == n for name, n in counts.items())
            for worker in status.workers
        )
    )


async def test_status_tells_changes_of_role_and_restarts_apart(stack: Stack) -> None:
    await stack.ready()
    stack.decode.begin_anew(role=session_pb2.ROLE_PREFILL)
    await seen(stack, deaths=0, drains=0, role_changes=1, lost_sessions=0)
    stack.decode.begin_anew(role=session_pb2.ROLE_DECODE)
    await seen(stack, deaths=0, drains=0, role_changes=2, lost_sessions=0)
    stack.decode.begin_anew(pool_id=b"another process.")
    await seen(stack, deaths=1, drains=0, role_changes=2, lost_sessions=0)
    stack.decode.report.draining = True
    await stack.until(lambda status: any(worker.report.draining for worker in status.workers))
    await stack.decode.stop()
    await seen(stack, deaths=1, drains=1, role_changes=2, lost_sessions=0)
    await stack.decode.start(stack.decode.port)
