"""Roles of workers: when the planner proposes a change, and which worker may change."""

import random
from dataclasses import dataclass, replace

import pytest

from baton.process.errors import FailedPrecondition, NotFound
from baton.process.registry.worker_record import WorkerRole
from baton.router.placement.cluster import Worker
from baton.router.placement.planner import (
    Planner,
    PlannerTiming,
    PlannerVerdict,
    Pressure,
    Situation,
    endpoint_to_change,
)
from tests.router.clusters import BOTH, described, reported

TIMING = PlannerTiming(hold_s=5.0, cool_down_s=30.0)
LOOK_S = 2.5  # seldomer than the router does, which is harder: a few unlucky measurements count for more


def look(prefill: float, decode: float, workers: tuple[int, int] = (2, 2), floor: float = 0.0) -> PlannerVerdict:
    """After it has held for long enough."""
    planner = Planner(TIMING)
    situation = Situation(*workers, Pressure(prefill, floor), Pressure(decode, floor))
    planner.look(situation, 0.0)
    return planner.look(situation, 6.0)


@pytest.mark.parametrize(
    ("prefill", "decode", "to"),
    [
        (0.9, 0.1, None),  # within the SLOs
        (1.6, 0.3, WorkerRole.PREFILL),
        (0.3, 1.6, WorkerRole.DECODE),
        (1.6, 1.5, None),  # both: nothing is gained
        (0.7, 1.2, None),  # prefill would have twice of 0.7
    ],
)
def test_the_busier_role_gets_a_worker_where_both_are_better_off_then(
    prefill: float, decode: float, to: WorkerRole | None
) -> None:
    assert look(prefill, decode).to is to


@pytest.mark.parametrize(
    ("workers", "prefill", "decode", "to"),
    [
        ((2, 2), Pressure(1.0), Pressure(0.1), None),  # just what the SLOs allow
        ((1, 3), Pressure(2.0, floor=1.0), Pressure(0.1), WorkerRole.PREFILL),  # falls by half of what it could
        ((1, 3), Pressure(2.0, floor=1.01), Pressure(0.1), None),
        ((2, 2), Pressure(2.0), Pressure(0.85), WorkerRole.PREFILL),  # decode then has 1.7, 15 % below 2.0
        ((2, 2), Pressure(2.0), Pressure(0.86), None),
        ((3, 2), Pressure(0.85), Pressure(2.0), WorkerRole.DECODE),  # its 2 workers then have 1.275
        ((2, 1), Pressure(0.2), Pressure(2.0), WorkerRole.DECODE),  # the last but one worker may go
    ],
)
def test_planner_at_a_bound_moves_a_worker_where_it_is_just_worth_it(
    workers: tuple[int, int], prefill: Pressure, decode: Pressure, to: WorkerRole | None
) -> None:
    planner, here = Planner(TIMING), Situation(*workers, prefill, decode)
    assert planner.look(here, 0.0).to is None
    assert planner.look(here, TIMING.hold_s).to is to


def test_pressure_without_a_divisible_part_stays_with_any_number_of_workers() -> None:
    assert Pressure(0.5, floor=0.8).over(1, instead_of=4) == 0.5
    assert Pressure(2.0, floor=0.5).over(3, instead_of=2) == 1.5


@pytest.mark.parametrize(("workers", "prefill", "decode"), [((1, 3), 0.0, 9.0), ((3, 1), 9.0, 0.0)])
def test_a_role_keeps_its_last_worker(workers: tuple[int, int], prefill: float, decode: float) -> None:
    verdict = look(prefill, decode, workers)
    assert verdict.to is None
    assert "cannot give up a worker" in verdict.why


def test_time_that_more_workers_would_not_shorten_is_no_reason() -> None:
    """A prompt that takes 3 s on any worker is beyond an SLO of 2 s with as many workers as one likes."""
    assert look(1.6, 0.1).to is WorkerRole.PREFILL
    assert look(1.6, 0.1, floor=1.5).to is None


def test_a_change_must_seem_worth_it_for_a_while() -> None:
    planner, busy, calm = Planner(TIMING), situation(2, 2, 0.2, 1.8), situation(2, 2, 0.2, 0.9)
    assert planner.look(busy, 0.0).to is None
    assert planner.look(calm, 4.0).to is None
    assert planner.look(busy, 5.0).to is None, "a moment of calm did not begin the wait anew"
    assert planner.look(busy, 10.1).to is WorkerRole.DECODE


def test_nothing_is_decided_while_a_worker_is_on_its_way() -> None:
    planner, moving = Planner(TIMING), Situation(2, 2, Pressure(0.2), Pressure(1.8), moving=True)
    assert [planner.look(moving, at).to for at in (0.0, 6.0, 60.0)] == [None] * 3


def test_after_a_change_there_is_none_for_a_while() -> None:
    planner, busy = Planner(TIMING), situation(4, 2, 0.2, 2.5)
    planner.look(busy, 0.0)
    assert planner.look(busy, 5.0).to is WorkerRole.DECODE
    planner.changed(5.0)
    assert [planner.look(busy, at).to for at in (6.0, 20.0, 34.9)] == [None] * 3
    assert planner.look(busy, 35.0).to is WorkerRole.DECODE


def situation(prefill_workers: int, decode_workers: int, prefill: float, decode: float) -> Situation:
    return Situation(prefill_workers, decode_workers, Pressure(prefill), Pressure(decode))


@dataclass
class World:
    """Work for each role, in workers that it keeps busy; pressures are measured with noise."""

    chance: random.Random
    workers: int
    prefill_workers: int
    prefill_work: float
    decode_work: float
    noise: float = 0.1
    changes: int = 0

    def run(self, planner: Planner, begin_s: float, seconds: float) -> None:
        for tick in range(int(seconds / LOOK_S)):
            now = begin_s + tick * LOOK_S
            verdict = planner.look(self.situation(), now)
            if verdict.to is not None:
                self.prefill_workers += 1 if verdict.to is WorkerRole.PREFILL else -1
                assert 1 <= self.prefill_workers < self.workers
                planner.changed(now)
                self.changes += 1

    def situation(self) -> Situation:
        decode_workers = self.workers - self.prefill_workers
        prefill = self._noisy(self.prefill_work / self.prefill_workers)
        return situation(self.prefill_workers, decode_workers, prefill, self._noisy(self.decode_work / decode_workers))

    def _noisy(self, level: float) -> float:
        return level * (1 + self.chance.uniform(-self.noise, self.noise))

    @property
    def worst(self) -> float:
        return self.worst_with(self.prefill_workers)

    def worst_with(self, prefill_workers: int) -> float:
        return max(self.prefill_work / prefill_workers, self.decode_work / (self.workers - prefill_workers))


def test_clusters_settle_near_the_best_split_and_stay_there() -> None:
    """Each from any split, under a load that stays; then the load moves once, and it settles again."""
    for seed in range(300):
        chance = random.Random(seed)
        workers = chance.randint(2, 16)
        world = World(chance, workers, chance.randint(1, workers - 1), 0.0, 0.0)
        planner = Planner(replace(TIMING, cool_down_s=12.5))
        for phase in range(2):
            share = chance.uniform(0.1, 0.9)
            load = workers * chance.uniform(0.3, 1.5)
            world.prefill_work, world.decode_work = load * share, load * (1 - share)
            started = world.prefill_workers
            world.changes = 0
            world.run(planner, phase * 1000.0, 250.0)
            best = min(map(world.worst_with, range(1, workers)))
            assert world.worst <= max(1.15, best * 1.45), f"seed {seed}: {world}, best {best}"
            assert world.changes == abs(world.prefill_workers - started), f"seed {seed} went to and fro"


def worker(name: str, roles: tuple[WorkerRole, ...] = BOTH, model: bytes = b"f", draining: bool = False) -> Worker:
    role = WorkerRole(name.partition("-")[0])
    description = described(name, role, fingerprint=model, roles=roles)
    return Worker(f"{name}:1", role, True, True, description, 1, reported(draining=draining))


def test_one_of_two_may_change_and_one_that_is_so_already_need_not() -> None:
    workers = [worker("prefill-0"), worker("prefill-1"), worker("decode-0")]
    assert endpoint_to_change(workers, "prefill-1", WorkerRole.DECODE) == "prefill-1:1"
    assert endpoint_to_change(workers, "decode-0", WorkerRole.DECODE) is None


@pytest.mark.parametrize(
    "workers",
    [
        [worker("decode-0"), worker("prefill-0")],  # the last one
        [worker("decode-0"), worker("decode-1", draining=True)],  # the other one is leaving
        [worker("decode-0"), worker("decode-1", model=b"g")],  # the other one serves another model
        [worker("decode-0", roles=()), worker("decode-1")],  # it has one for life
        [worker("decode-0", draining=True), worker("decode-1")],  # it is changing already
    ],
)
def test_otherwise_it_is_refused(workers: list[Worker]) -> None:
    with pytest.raises(FailedPrecondition):
        endpoint_to_change(workers, "decode-0", WorkerRole.PREFILL)


def test_a_worker_that_nobody_knows_is_not_found() -> None:
    with pytest.raises(NotFound):
        endpoint_to_change([worker("decode-0")], "decode-7", WorkerRole.PREFILL)
