"""Who is a member, judged from listings with given times."""

from baton.process.registry.membership import MembershipView
from baton.process.registry.worker_record import WorkerRecord, WorkerRole


def _record(worker_id: str, epoch: int = 1) -> WorkerRecord:
    return WorkerRecord(worker_id, WorkerRole.DECODE, f"host:{epoch}", epoch, "00")


def test_listed_worker_is_a_member_immediately() -> None:
    view = MembershipView(ttl_s=3)
    assert view.observe([_record("b"), _record("a")], now=0)
    assert [record.worker_id for record in view.workers] == ["a", "b"]
    assert not view.observe([_record("a"), _record("b")], now=1)


def test_worker_is_gone_after_being_missing_for_the_ttl() -> None:
    view = MembershipView(ttl_s=3)
    view.observe([_record("a")], now=0)
    assert not view.observe([], now=10)
    assert not view.observe([], now=13)
    assert view.observe([], now=13.1)
    assert view.workers == ()


def test_worker_that_returns_in_time_starts_afresh() -> None:
    view = MembershipView(ttl_s=3)
    for now, listed in ((0, [_record("a")]), (1, []), (3, [_record("a")]), (4, []), (6.5, [])):
        view.observe(listed, now)
    assert len(view.workers) == 1


def test_lost_registry_removes_nobody() -> None:
    view = MembershipView(ttl_s=3)
    view.observe([_record("a")], now=0)
    view.observe([], now=1)
    view.lost_contact()
    assert not view.observe([], now=100)
    assert not view.observe([], now=102)
    assert view.observe([], now=104)


def test_higher_epoch_replaces_and_a_lower_one_is_ignored() -> None:
    view = MembershipView(ttl_s=3)
    view.observe([_record("a", epoch=2)], now=0)
    assert not view.observe([_record("a", epoch=1)], now=1)
    assert view.workers == (_record("a", epoch=2),)
    assert view.observe([_record("a", epoch=3)], now=2)
    assert view.workers == (_record("a", epoch=3),)


def test_lower_epoch_is_accepted_after_the_higher_one_missed_its_ttl() -> None:
    """Redis lost its data, and the clock that a restarted worker took its epoch from had gone back."""
    view = MembershipView(ttl_s=3)
    view.observe([_record("a", epoch=2)], now=0)
    for now in (1, 2, 3, 4):
        view.observe([_record("a", epoch=1)], now)
        assert view.workers == (_record("a", epoch=2),)
    view.observe([_record("a", epoch=1)], now=4.1)
    view.observe([_record("a", epoch=1)], now=4.6)
    assert view.workers == (_record("a", epoch=1),)
