"""What a router makes of its own wrong predictions."""

from baton.router.cache.audit import LEAST_REQUESTS, RESYNC_PERIOD_S, WINDOW_REQUESTS, CacheAudit


def test_tokens_are_counted_on_both_sides() -> None:
    audit = CacheAudit()
    for predicted, actual in ((64, 64), (64, 32), (0, 96)):
        audit.take(predicted, actual)
    assert (audit.checked_requests, audit.equal_requests) == (3, 1)
    assert (audit.missing_tokens, audit.surplus_tokens) == (32, 96)


def test_drift_is_that_of_the_newest_requests() -> None:
    audit = CacheAudit()
    audit.take(32, 0)
    assert audit.drift == 1.0
    for _ in range(WINDOW_REQUESTS):
        audit.take(32, 32)
    assert audit.drift == 0.0


def test_much_drift_asks_for_a_resync_once_in_a_while() -> None:
    audit = CacheAudit()

    def drift() -> None:
        for _ in range(LEAST_REQUESTS):
            audit.take(32, 0)

    audit.take(32, 0)
    assert not audit.wants_resync(now=0.0), "one request is no drift"
    drift()
    assert audit.wants_resync(now=1.0)
    drift()
    assert not audit.wants_resync(now=2.0)
    assert audit.wants_resync(now=1.0 + RESYNC_PERIOD_S)
