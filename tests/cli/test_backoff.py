"""Waiting before a dead process is started again."""

from baton.launch.processes import Backoff


def test_backoff_doubles_up_to_ten_seconds() -> None:
    backoff = Backoff()
    delays = [backoff.delay_after(lived_s=0.1) for _ in range(8)]
    assert delays == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]


def test_backoff_after_healthy_life_is_reset() -> None:
    backoff = Backoff()
    for _ in range(5):
        backoff.delay_after(lived_s=1.0)
    assert backoff.delay_after(lived_s=30.0) == 0.2
    assert backoff.delay_after(lived_s=29.9) == 0.4


def test_backoff_after_many_deaths_does_not_overflow() -> None:
    assert Backoff(deaths=100_000).delay_after(lived_s=0.0) == 10.0
