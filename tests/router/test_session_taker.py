"""Which worker takes over what a worker that leaves keeps for a session, and what it is told."""

from collections import Counter
from dataclasses import replace

from baton.process.registry.worker_record import WorkerRole
from baton.protos import kept_session_pb2, session_pb2
from baton.router.fleet import wire as link_wire
from baton.router.placement.cluster import Worker
from baton.router.placement.hand_over import taker
from baton.router.types.worker import PoolBlocks, SessionReport
from tests.router.clusters import described, reported


def worker(
    name: str,
    free: int = 100,
    protected: int = 0,
    role: WorkerRole = WorkerRole.DECODE,
    fingerprint: bytes = b"f",
    draining: bool = False,
) -> Worker:
    pages, sessions = PoolBlocks(100, free, 100 - free, 0, 0, 0), SessionReport(protected_blocks=protected)
    report = reported(pages=pages, draining=draining, sessions=sessions)
    description = described(name, role, fingerprint=fingerprint)
    return Worker(name, role, connected=True, description=description, report=report)


LEAVING = worker("leaving", draining=True)


def taken(*others: Worker, blocks: int = 10, handed: Counter[str] | None = None) -> str | None:
    return taker([LEAVING, *others], LEAVING, blocks, handed or Counter())


def test_worker_with_most_unneeded_blocks_takes_the_session_over() -> None:
    assert taken(worker("a", protected=20), worker("b", protected=10), worker("c", protected=30)) == "b"
    assert taken(worker("a"), worker("b", free=0)) == taken(worker("b", free=0), worker("a"))


def test_sessions_given_since_the_last_report_count() -> None:
    assert taken(worker("a"), worker("b", protected=10), handed=Counter({"a": 11})) == "b"


def test_session_is_dropped_if_no_worker_has_capacity() -> None:
    assert taken(worker("a", protected=91), blocks=10) is None
    assert taken(worker("a", protected=90), blocks=10) == "a"


def test_only_another_worker_of_the_same_role_and_kv_that_takes_work_can() -> None:
    others = (
        worker("prefill", role=WorkerRole.PREFILL),
        worker("other model", fingerprint=b"g"),
        worker("leaves too", draining=True),
        replace(worker("gone"), connected=False),
    )
    assert taken(*others) is None
    assert taken() is None


def test_taker_receives_the_location_and_owner_of_the_blocks() -> None:
    of = kept_session_pb2.KeptSession(id=b"i" * 16, owner=b"o" * 8, keep_for_s=2.5)
    hand_over = session_pb2.HandOver(session=of, block_hashes=[b"a", b"b"])
    command = link_wire.bring(hand_over, "leaving", b"t" * 16).message
    assert command.bring.session == of
    assert list(command.bring.block_hashes) == [b"a", b"b"]
    fetch = command.bring.fetch
    assert (fetch.endpoint, fetch.transfer_id, fetch.blocks) == ("leaving", b"t" * 16, 2)
