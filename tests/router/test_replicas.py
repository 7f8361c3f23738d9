"""How many workers of a role there should be: enough for the SLO, few changes, and the least again after the load."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest

from baton.lab.benchmarks.placement.traces import TraceArrival, from_zero, read_trace
from baton.lab.planning.autoscaler import DOWN, SYNC_PERIOD_S, HorizontalAutoscaler, ScalingRules, read_autoscaler
from baton.lab.planning.operation import turns
from baton.launch.paths import ROOT
from baton.process.registry.worker_record import WorkerRole
from baton.router.placement.cluster import Worker
from baton.router.placement.planner import Pressure, Situation
from baton.router.placement.replicas import MOST_WORKERS, SPARE, TARGET, Replicas, ReplicaTiming, RoleReplicas, wanted
from baton.router.roles import PREFILL_SHARE, RECOVER_S, WINDOW_S, TokenFlow
from baton.router.types.worker import PoolBlocks, WorkerReport

TRACES = Path(__file__).parents[1] / "fixtures" / "traces"
LOOK_S = 2.0  # seldomer than the router does, which is harder
START_S = 45.0  # until a worker that was asked for serves
SLO_S = 2.0  # of TTFT, as of a router
PROMPT_S = 0.5
MANIFEST = ROOT / "deploy" / "kubernetes" / "components" / "autoscaling" / "autoscalers.yaml"
HOUR_S = 3600.0


@dataclass
class World:
    """One role whose workers work off what comes, in seconds of work of one worker; an autoscaler follows the number.

    The pressure is that of `router/roles.py`: utilisation of the last ten seconds, and the wait of what has come.
    """

    replicas: RoleReplicas
    workers: int = 1
    noise: float = 0.0
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    backlog_s: float = 0.0
    starting: list[float] = field(default_factory=list)  # when each begins to serve
    arrived: list[float] = field(default_factory=list)  # work of the last looks
    numbers: list[int] = field(default_factory=list)
    late_s: float = 0.0  # time in which what came waited longer than the SLO allows
    scaler: HorizontalAutoscaler | None = None  # None: the number is followed immediately
    asked: list[int] = field(default_factory=list)  # replicas
    deaths_per_h: float = 0.0

    def run(self, work_s: Callable[[float, float], float], seconds: float) -> None:
        """`work_s(begin, end)`: that comes in between."""
        begin = len(self.numbers)
        for tick in range(begin, begin + int(seconds / LOOK_S)):
            now = tick * LOOK_S
            self.workers += sum(at_s <= now for at_s in self.starting)
            self.starting = [at_s for at_s in self.starting if at_s > now]
            came_s = work_s(now, now + LOOK_S)
            self.arrived = [*self.arrived, came_s][-int(WINDOW_S / LOOK_S) :]
            self.backlog_s = max(0.0, self.backlog_s + came_s - self.workers * LOOK_S)
            wait_s = self.backlog_s / self.workers
            self.late_s += LOOK_S if wait_s > SLO_S else 0.0
            level = max(sum(self.arrived) / WINDOW_S / self.workers / PREFILL_SHARE, wait_s / SLO_S)
            comes = sum(self.arrived) / WINDOW_S / self.workers + wait_s / RECOVER_S
            noise = 1 + self.chance.uniform(-self.noise, self.noise)
            number = self.replicas.look(
                Pressure(noise * level, shared=noise * comes / PREFILL_SHARE), self.workers, now
            )
            self.numbers.append(number)
            if self.workers > 1 and self.chance.random() < self.deaths_per_h * LOOK_S / HOUR_S:
                self.workers -= 1
            asked = self._asked(number, now)
            missing = asked - self.workers - len(self.starting)
            self.starting += [now + START_S] * max(0, missing)
            self.workers = min(self.workers, max(1, asked))

    def _asked(self, number: int, now: float) -> int:
        asked = number if self.scaler is None else (self.asked or [self.workers])[-1]
        if self.scaler is not None and now % SYNC_PERIOD_S < LOOK_S:
            waiting = max(0.0, self.backlog_s / PROMPT_S - self.workers)
            values = {'baton_desired_replicas{role="prefill"}': float(number), "baton_prefill_waiting": waiting}
            asked = self.scaler.sync(asked, self.workers, values, now)
        self.asked.append(asked)
        return asked

    @property
    def changes(self) -> int:
        return sum(one != other for one, other in pairwise(self.numbers))

    @property
    def turns(self) -> int:
        """Changes of direction."""
        return turns(self.asked)


def autoscaled(seed: int, timing: ReplicaTiming | None = None, is_stable: bool = True) -> World:
    """Return the prefill set of deploy/kubernetes with its autoscaler, whose workers die. `is_stable`: with windows."""
    spec = read_autoscaler(MANIFEST, "baton-prefill")
    if not is_stable:
        spec = replace(spec, up=replace(spec.up, window_s=0.0), down=ScalingRules(0.0, DOWN.policies))
    chance, scaler = random.Random(seed), HorizontalAutoscaler(spec)
    return World(RoleReplicas(timing or ReplicaTiming()), 2, 0.15, chance, scaler=scaler, deaths_per_h=12.0)


@pytest.mark.parametrize("seed", range(5))
def test_autoscaler_follows_a_step_within_two_minutes_and_reverses_once(seed: int) -> None:
    cluster = autoscaled(seed)
    cluster.run(constant(1.0), 900.0)
    before = len(cluster.asked)
    cluster.run(constant(4.0), 1800.0)
    after_s = LOOK_S * next(place for place, asked in enumerate(cluster.asked[before:]) if asked >= 6)
    assert after_s < 120.0
    cluster.run(constant(1.0), 3600.0)
    assert turns(cluster.asked[before:]) == 1
    assert max(cluster.asked) >= math.ceil(4.0 / PREFILL_SHARE / TARGET)
    assert cluster.asked[-1] <= 3


def test_autoscaler_without_stabilisation_oscillates_under_constant_load() -> None:
    cluster = autoscaled(0, ReplicaTiming(up_s=0.0, down_s=0.0, step_s=0.0), is_stable=False)
    cluster.run(constant(3.0), 1800.0)
    assert cluster.turns > 10


def world(noise: float = 0.0) -> World:
    return World(RoleReplicas(), noise=noise)


def constant(workers: float) -> Callable[[float, float], float]:
    """Keeps so many workers busy."""
    return lambda begin, end: workers * (end - begin)


def nothing(begin: float, end: float) -> float:
    return 0.0


def test_step_is_followed_immediately_and_kept() -> None:
    cluster = world()
    cluster.run(constant(0.5), 900.0)
    cluster.run(constant(5.0), HOUR_S)
    enough = math.ceil(5.0 / PREFILL_SHARE / TARGET)
    assert enough <= cluster.numbers[-1] <= enough + 1
    assert max(cluster.numbers) <= 3 * enough, "the backlog of the step may be worked off with more"
    assert cluster.turns <= 1
    assert cluster.late_s < 300.0


def test_workers_leave_one_at_a_time_down_to_one_after_the_load() -> None:
    cluster = world()
    cluster.run(constant(6.0), 1800.0)
    peak = cluster.numbers[-1]
    cluster.run(nothing, 2 * HOUR_S)
    falling = cluster.numbers[900:]
    assert cluster.numbers[-1] == 1
    assert {a - b for a, b in pairwise(falling)} == {0, 1}
    assert len(set(falling)) == peak


@pytest.mark.parametrize("load", [0.3, 0.62, 0.65, 1.9, 2.0, 3.1, 5.9])
def test_noise_around_any_load_makes_the_number_go_to_and_fro_at_most_once(load: float) -> None:
    cluster = world(noise=0.15)
    cluster.run(constant(load), 3 * HOUR_S)
    assert cluster.turns <= 1
    assert len(set(cluster.numbers[1800:])) <= 2, "an unlucky quarter of a minute may add one worker, for good"


@pytest.mark.parametrize("period_s", [120.0, 1200.0, 7200.0])
def test_wave_is_followed_once_each_way_and_ignored_if_short(period_s: float) -> None:
    cluster = world(noise=0.05)
    cluster.run(lambda begin, end: (3.0 + 2.5 * math.sin(2 * math.pi * begin / period_s)) * (end - begin), 4 * HOUR_S)
    periods = 4 * HOUR_S / period_s
    assert cluster.turns <= 2 * periods + 2, "the start from one worker has a backlog of its own"
    assert cluster.changes <= 2 * periods * max(cluster.numbers)
    assert cluster.late_s < 300.0
    if period_s < ReplicaTiming().down_s:
        assert len(set(cluster.numbers[900:])) == 1


def work_of(arrivals: Sequence[TraceArrival], tokens_per_s: float) -> Callable[[float, float], float]:
    """Of the prompts of a recorded hour, over and over. Each request of the sample stands for the twenty of which it is
    one, at any time within the minute around it.
    """
    chance, span_s = random.Random(2), arrivals[-1].at_s + 1.0
    buckets: dict[int, float] = {}
    for arrival in arrivals:
        for _ in range(20):
            place = int((arrival.at_s + chance.uniform(-30.0, 30.0)) % span_s / LOOK_S)
            buckets[place] = buckets.get(place, 0.0) + arrival.input_tokens / tokens_per_s
    return lambda begin, end: buckets.get(int(begin % span_s / LOOK_S), 0.0)


@pytest.mark.parametrize(
    ("name", "tokens_per_s"), [("azure-conversations.csv", 2000.0), ("mooncake-conversations.jsonl", 12_000.0)]
)
def test_recorded_hour_three_times_over_keeps_the_slo_with_few_changes(name: str, tokens_per_s: float) -> None:
    cluster = world()
    cluster.run(work_of(from_zero(read_trace(TRACES / name)), tokens_per_s), 3 * HOUR_S)
    assert cluster.late_s / (3 * HOUR_S) < 0.03
    assert cluster.turns <= 12
    assert cluster.changes <= 60
    assert 3 <= max(cluster.numbers) <= 20
    cluster.run(nothing, 2 * HOUR_S)
    assert cluster.numbers[-1] == 1


def test_peak_and_a_lull_that_are_short_change_nothing() -> None:
    cluster = world()
    cluster.run(constant(1.8), 1200.0)
    before = cluster.numbers[-1]
    cluster.run(nothing, 240.0)
    assert cluster.numbers[-1] == before
    cluster.run(constant(1.8), 600.0)
    cluster.run(constant(6.0), 8.0)
    assert cluster.numbers[-1] == before


def test_desired_workers_are_at_most_twice_the_present_ones_before_new_ones_start() -> None:
    replicas = RoleReplicas()
    numbers = [replicas.look(Pressure(50.0, shared=50.0), 3, float(now)) for now in range(600)]
    assert max(numbers) == 6
    assert RoleReplicas().look(Pressure(1e9), MOST_WORKERS, 0.0) == MOST_WORKERS


def test_router_that_starts_asks_for_the_workers_that_are_there() -> None:
    """A restart under no load must not end five workers at once."""
    replicas = RoleReplicas()
    numbers = [replicas.look(Pressure(0.0), 5, float(now)) for now in range(300)]
    assert set(numbers) == {5}


def test_too_long_step_alone_requests_no_worker_but_waiting_requests_do() -> None:
    assert wanted(Pressure(1.2, floor=1.2, shared=0.4), 4) == pytest.approx(2.0)
    assert wanted(Pressure(1.6, floor=1.2, shared=0.4), 4) == pytest.approx(5.0)
    assert wanted(Pressure(9.0, floor=0.4), 2) == pytest.approx(2.5)


def test_short_wait_does_not_multiply_workers_if_prompts_need_most_of_the_ttft() -> None:
    assert wanted(Pressure(0.82, floor=0.79, shared=0.5), 10) == pytest.approx(6.25)


def looks(replicas: RoleReplicas, numbers: list[float], workers: int = 4, every_s: float = 1.0) -> list[int]:
    """`numbers`: of workers that would be just enough, at one look after another."""
    shared = [Pressure(0.0, shared=TARGET * number / workers) for number in numbers]
    return [replicas.look(each, workers, every_s * place) for place, each in enumerate(shared)]


def test_replicas_rise_to_the_least_that_was_wanted_in_the_whole_window() -> None:
    timing = ReplicaTiming(up_s=3.0, down_s=1e6)
    assert looks(RoleReplicas(timing), [5.5, 6.5, 5.2, 7.5]) == [4, 4, 4, 6]
    # Once 4 were enough.
    assert looks(RoleReplicas(timing), [5.5, 6.5, 4.0, 7.5, 5.5, 5.5, 5.5]) == [4, 4, 4, 4, 4, 4, 6], (
        "4 are enough once"
    )


def test_replicas_fall_by_one_where_the_most_that_was_wanted_leaves_room() -> None:
    timing = ReplicaTiming(up_s=1e6, down_s=3.0, step_s=2.0)
    bound = 3 * (1 - SPARE)
    assert looks(RoleReplicas(timing), [bound] * 4) == [4, 4, 4, 3]
    assert looks(RoleReplicas(timing), [bound + 0.01] + [0.5] * 3) == [4] * 4, "once more was wanted"
    assert looks(RoleReplicas(timing), [0.5] * 10) == [4, 4, 4, 3, 3, 2, 2, 1, 1, 1]


def test_role_that_no_worker_has_had_is_not_asked_for() -> None:
    replicas = Replicas()
    replicas.look(Situation(0, 2, Pressure(0.0), Pressure(0.1)), 0.0)
    assert replicas.desired == {WorkerRole.DECODE: 2}
    replicas.look(Situation(1, 0, Pressure(0.0), Pressure(0.0)), 1.0)
    assert replicas.desired == {WorkerRole.PREFILL: 1, WorkerRole.DECODE: 2}, (
        "those that were asked for are on their way"
    )


def prefill_worker(name: str, computed_tokens: int) -> Worker:
    blocks = PoolBlocks(100, 100, 0, 0, 0, 0)
    report = WorkerReport(100, 8, blocks, 0, 0, 0, draining=False, steps=0, cache_query_tokens=computed_tokens)
    return Worker(f"{name}:1", WorkerRole.PREFILL, True, True, None, 1, report)


def test_tokens_of_other_routers_count_and_earlier_ones_do_not() -> None:
    flow = TokenFlow()
    flow.take([prefill_worker("a", 5000)], 0.0)
    assert flow.tokens_per_s == 0.0
    flow.take([prefill_worker("a", 5600), prefill_worker("came", 900)], 2.0)
    assert flow.tokens_per_s == 300.0
    flow.take([prefill_worker("a", 100), prefill_worker("came", 1900)], 4.0)
    assert flow.tokens_per_s == 0.0, "one counts anew, the other one was not there at the beginning"
