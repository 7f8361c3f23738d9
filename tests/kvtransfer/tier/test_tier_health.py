"""A failing disk is tried again, less and less often, and never more than once a pause."""

from baton.kvtransfer.tier.health import FIRST_PAUSE_S, LONGEST_PAUSE_S, DiskRetryState


def test_health_is_on_until_a_failure() -> None:
    health = DiskRetryState()
    assert health.is_on
    assert health.allows(0.0)
    assert not health.worked()


def test_health_allows_nothing_during_the_pause_after_a_failure() -> None:
    health = DiskRetryState()
    assert health.failed(100.0)
    assert not health.is_on
    assert not health.allows(100.0 + FIRST_PAUSE_S - 0.01)
    assert health.allows(100.0 + FIRST_PAUSE_S)


def test_health_pauses_double_up_to_the_longest() -> None:
    health, now, pauses = DiskRetryState(), 0.0, []
    for _ in range(10):
        health.failed(now)
        begin = now
        while not health.allows(now):
            now += 0.5
        pauses.append(now - begin)
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
    assert max(pauses) == pauses[-1] == LONGEST_PAUSE_S
    assert health.failures == 10


def test_only_the_first_failure_and_the_first_success_are_news() -> None:
    health = DiskRetryState()
    assert [health.failed(0.0), health.failed(1.0), health.worked(), health.worked()] == [True, False, True, False]
    assert health.failed(2.0)


def test_short_recovery_keeps_doubling_the_pause() -> None:
    health = DiskRetryState()
    pauses = []
    for now in (0.0, 1.5, 4.0, 100.0):
        health.failed(now)
        pauses.append(health.pause_left_s(now))
        health.worked()
        assert health.pause_left_s(now) == 0.0
    assert pauses == [1.0, 2.0, 4.0, 1.0]
