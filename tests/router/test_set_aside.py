"""Who gets no more work for a while: pairs whose transfers fail, and workers that take no steps."""

from dataclasses import replace

from baton.process.registry.worker_record import WorkerRole
from baton.router.placement.cluster import FAILURES, FIRST_S, LAST_S, STALLED_S, PairCircuitBreaker
from baton.router.placement.decide import LocalPrefill, NoPrefillWorker, Placement, place
from baton.router.types.placement import PlacementRequest, WorkerView
from tests.fixtures.router_defaults import make_policy
from tests.router.clusters import cluster_of, reported

PAIR = ("p0", "d0")
REPORT = reported(running_sequences=1, steps=7)


def fail(pairs: PairCircuitBreaker, times: int, now: float) -> None:
    for _ in range(times):
        pairs.failed(PAIR, now)


def test_repeatedly_failing_worker_is_set_aside_for_longer_up_to_a_bound() -> None:
    pairs, now, aside_s = PairCircuitBreaker(), 0.0, FIRST_S
    fail(pairs, FAILURES, now)
    for _ in range(8):
        now += aside_s
        assert pairs.broken(now) == frozenset()
        fail(pairs, 1, now)
        aside_s = min(LAST_S, 2 * aside_s)
        assert pairs.broken(now + aside_s - 0.1) == {PAIR}


def test_exited_process_takes_its_failures_along() -> None:
    pairs = PairCircuitBreaker()
    fail(pairs, FAILURES, 0.0)
    pairs.forget("p0")
    assert pairs.broken(0.0) == frozenset()


def views(*names: str) -> list[WorkerView]:
    roles = {"p": WorkerRole.PREFILL, "d": WorkerRole.DECODE}
    return [WorkerView(name, roles[name[0]], b"f", 100, 8, 100, 8) for name in names]


def placed(broken_pairs: set[tuple[str, str]], *names: str) -> Placement:
    request = PlacementRequest(b"f", 4, 20, 8, 1, broken_pairs=frozenset(broken_pairs))
    placement = place(request, views(*names), make_policy(NoPrefillWorker.LOCAL))
    assert isinstance(placement, Placement)
    return placement


def test_pair_apart_is_not_put_together() -> None:
    everyone = ("p0", "p1", "d0", "d1")
    for broken_pairs in ({("p0", "d0")}, {("p0", "d0"), ("p0", "d1")}, {("p0", "d0"), ("p1", "d1")}):
        placement = placed(broken_pairs, *everyone)
        assert placement.prefill is not None
        assert (placement.prefill, placement.decode) not in broken_pairs


def test_where_every_pair_is_apart_decode_computes_the_prompt() -> None:
    assert placed({("p0", "d0")}, "p0", "d0").local_prefill is LocalPrefill.PREFILL_WORKERS_FAILED


def test_stalled_worker_is_not_placed_upon() -> None:
    cluster = cluster_of({"d": WorkerRole.DECODE})
    for now, available in ((0.0, 1), (STALLED_S + 1.0, 0)):
        cluster.reported("d", REPORT)
        cluster.measure("d", REPORT, now)
        assert cluster.available == available
    cluster.measure("d", replace(REPORT, steps=8), STALLED_S + 2.0)
    assert cluster.available == 1
