"""A cluster keeps the views of its workers from one request to the next: they must say what new ones would say."""

from dataclasses import replace
from random import Random

from baton.process.registry.worker_record import WorkerRole
from baton.router.placement.cluster import Cluster
from baton.router.placement.decide import Placement, place
from baton.router.placement.peer_load import WorkerLoad
from baton.router.placement.policies import Strategy
from baton.router.types.placement import PlacementRequest, WorkerView
from tests.fixtures.router_defaults import make_policy
from tests.router.clusters import join, reported

F = b"f" * 32
POLICY = make_policy(strategy=Strategy.CACHE_AWARE)
NAMES = [f"{role[0]}{number}" for role in WorkerRole for number in range(4)]


class Change:
    """Does the same to a cluster as to another one, where it was made with the same seed."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster, self.chance, self.placed = cluster, Random(seed), dict[int, Placement]()
        for name in NAMES:
            role = WorkerRole.PREFILL if name[0] == "p" else WorkerRole.DECODE
            join(cluster, name, role, slots=64, total_blocks=1000, total_slots=64, fingerprint=F)

    def prompt(self) -> tuple[bytes, ...]:
        first, length = self.chance.randrange(3), self.chance.randrange(1, 8)
        return tuple(bytes([first, number]) * 16 for number in range(length))

    def next(self, number: int) -> tuple[WorkerView, ...]:
        """What a placement sees after the next change."""
        chance, name, hashes = self.chance, self.chance.choice(NAMES), self.prompt()
        match chance.randrange(5):
            case 0:
                waiting = chance.randrange(3)
                self.cluster.reported(name, reported(1000, 64, running_sequences=waiting, pending_tokens=100 * waiting))
            case 1:
                self.cluster.caches.assume(name, hashes, 20)
            case 2 if self.placed:
                attempt_id = chance.choice(list(self.placed))
                for endpoint in self.placed.pop(attempt_id).endpoints:
                    self.cluster.release(attempt_id, endpoint)
            case _:
                request = PlacementRequest(F, 32, 32 * len(hashes) + 1, 16, 1, turn=number)
                outcome = place(request, self.cluster.snapshot(hashes, number), POLICY)
                assert isinstance(outcome, Placement)
                self.placed[number] = outcome
                self.cluster.charge(number, outcome, request, hashes)
        return self.cluster.snapshot(self.prompt(), number)


def test_kept_views_equal_new_ones() -> None:
    for seed in range(10):
        kept, always_new = Change(Cluster(), seed), Change(Cluster(), seed)
        for number in range(80):
            before = dict(kept.placed)
            always_new.cluster.others_have({"nobody": WorkerLoad(requests=number)})  # which makes all views anew
            new = always_new.next(number)
            assert _without_age(kept.next(number)) == _without_age(new), f"seed {seed}, change {number}, {before}"


def test_prompt_that_was_just_sent_counts_before_the_worker_reports_it() -> None:
    cluster = Change(Cluster(), 0).cluster
    request = PlacementRequest(F, 32, 321, 16, 1)
    policy = make_policy(strategy=Strategy.CACHE_AWARE)
    decode = [view for view in cluster.snapshot(()) if view.role is WorkerRole.DECODE]
    outcome = place(request, decode, policy)
    assert isinstance(outcome, Placement)

    def pending() -> int:
        return next(view for view in cluster.snapshot(()) if view.endpoint == outcome.decode).pending_prompt_tokens

    cluster.charge(1, outcome, request, ())
    assert pending() == 321
    cluster.reported(outcome.decode, reported(1000, 64, running_sequences=1, pending_tokens=400))
    assert pending() == 400, "the report has it too"
    cluster.prompt_computed(1, outcome.decode)
    cluster.reported(outcome.decode, reported(1000, 64, running_sequences=1))
    assert pending() == 0
    cluster.release(1, outcome.decode)
    assert pending() == 0


def _without_age(views: tuple[WorkerView, ...]) -> list[WorkerView]:
    """`recent_tokens` may be a little old in a view that was kept."""
    return [replace(view, recent_tokens=0.0) for view in views]
