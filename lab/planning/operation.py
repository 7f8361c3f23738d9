"""Simulated operation of a cluster: its planner or autoscalers act while workers start, drain, die and return.

Router, planner, workers and their drains are the real code in virtual time (`lab/sizing/cluster.py`). A pod that was
created or has died serves after a delay. Deaths are drawn from the seed.
"""

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from unittest.mock import patch

from baton.lab.planning.autoscaler import SYNC_PERIOD_S, AutoscalerSpec, HorizontalAutoscaler
from baton.lab.simulation.network.loop import SimulatedProcess, spawn
from baton.lab.simulation.processes import SimulatedMachine
from baton.lab.sizing.cluster import CallResult, ClusterShape, SimulatedCluster, SizingCall, quiet
from baton.lab.sizing.costs import Overheads, StepCosts
from baton.process.registry.worker_record import WorkerRole
from baton.router.fleet.fleet import WorkerLinks
from baton.router.placement.planner import serves
from baton.router.process import RouterProcess

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
START_S = (20.0, 60.0)  # range of the time from the creation or death of a pod until its worker starts
LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class OperationSetting:
    """Router flags, autoscaler of each role (none: fixed numbers), and mean number of workers' deaths per hour."""

    flags: tuple[str, ...] = ()
    autoscalers: Mapping[WorkerRole, AutoscalerSpec] = field(default_factory=dict)
    deaths_per_h: float = 0.0


@dataclass(frozen=True, slots=True)
class OperationSample:
    """Numbers at one time: serving workers of each role, and for an autoscaler the desired number and the replicas."""

    at_s: float
    serving: Mapping[WorkerRole, int]
    desired: Mapping[WorkerRole, int]
    replicas: Mapping[WorkerRole, int]


@dataclass(frozen=True, slots=True)
class RoleChange:
    at_s: float
    to: WorkerRole


@dataclass(slots=True)
class OperationRecord:
    answers: list[CallResult] = field(default_factory=list)
    samples: list[OperationSample] = field(default_factory=list)
    changes: list[RoleChange] = field(default_factory=list)
    deaths_s: list[float] = field(default_factory=list)


class PodSet:
    """Workers of one first role as a StatefulSet keeps them: the first `replicas` machines run, the others drain."""

    def __init__(self, machines: Sequence[SimulatedMachine], replicas: int, draw: random.Random) -> None:
        self.replicas = replicas
        self._machines = machines
        self._draw = draw
        self._due_s: dict[str, float] = {}  # time of the next start by machine that does not run
        self._draining: set[str] = set()

    @property
    def running(self) -> list[SimulatedMachine]:
        return [each for each in self._machines if each.is_up and each.name not in self._draining]

    def look(self, now: float) -> None:
        """Start and drain machines."""
        for number, machine in enumerate(self._machines):
            name = machine.name
            if not machine.is_up:
                self._draining.discard(name)
                if number >= self.replicas:
                    self._due_s.pop(name, None)
                elif now >= self._due_s.setdefault(name, now + self._draw.uniform(*START_S)):
                    del self._due_s[name]
                    machine.start()
            elif number >= self.replicas and name not in self._draining and machine.life and machine.life.running:
                self._draining.add(name)
                machine.drain()


class _Operation:
    def __init__(
        self, shape: ClusterShape, costs: StepCosts, overheads: Overheads, setting: OperationSetting, seed: int
    ) -> None:
        self._setting = setting
        self._deaths = random.Random(f"deaths {seed}")
        draw = random.Random(f"pods {seed}")
        self._cluster = SimulatedCluster(shape, lambda role: costs, overheads, seed, setting.flags, self._begin)
        counts = {PREFILL: shape.prefill, DECODE: shape.decode}
        self._sets = {role: PodSet(self._cluster.workers[role], counts[role], draw) for role in WorkerRole}
        self._scalers = {role: HorizontalAutoscaler(spec) for role, spec in setting.autoscalers.items()}
        self._record = OperationRecord()
        self._began_s = 0.0

    def run(self, calls: Sequence[SizingCall]) -> OperationRecord:
        real = WorkerLinks.change_role

        def change_role(links: WorkerLinks, worker_id: str, role: WorkerRole) -> None:
            real(links, worker_id, role)
            self._record.changes.append(RoleChange(self._now_s, role))

        with patch.object(WorkerLinks, "change_role", change_role):
            self._record.answers = self._cluster.run(calls)
        return self._record

    @property
    def _now_s(self) -> float:
        return self._cluster.loop.time() - self._began_s

    def _begin(self, router: RouterProcess) -> None:
        self._began_s = self._cluster.loop.time()
        process = SimulatedProcess("operator")
        for name, work in (("pods", self._look(router)), ("autoscalers", self._scale(router)), ("deaths", self._die())):
            spawn(self._cluster.loop, process, work, name)

    async def _look(self, router: RouterProcess) -> None:
        while True:
            for pods in self._sets.values():
                pods.look(self._now_s)
            serving = [each.role for each in router.cluster.workers if serves(each)]
            counts = {role: serving.count(role) for role in WorkerRole}
            replicas = {role: pods.replicas for role, pods in self._sets.items()}
            self._record.samples.append(OperationSample(self._now_s, counts, dict(router.desired), replicas))
            await asyncio.sleep(LOOK_S)

    async def _scale(self, router: RouterProcess) -> None:
        while self._scalers:
            await asyncio.sleep(SYNC_PERIOD_S)
            values = metric_values(router)
            for role, scaler in self._scalers.items():
                pods = self._sets[role]
                pods.replicas = scaler.sync(pods.replicas, len(pods.running), values, self._now_s)

    async def _die(self) -> None:
        while self._setting.deaths_per_h:
            await asyncio.sleep(self._deaths.expovariate(self._setting.deaths_per_h / 3600))
            running = [machine for pods in self._sets.values() for machine in pods.running]
            if running:
                self._deaths.choice(running).kill(peers_notice=True)
                self._record.deaths_s.append(self._now_s)


def operate(
    shape: ClusterShape,
    costs: StepCosts,
    overheads: Overheads,
    setting: OperationSetting,
    seed: int,
    calls: Sequence[SizingCall],
) -> OperationRecord:
    """Operate a cluster under a load until all calls have ended. Raises: RuntimeError if it gets stuck."""
    with quiet():
        return _Operation(shape, costs, overheads, setting, seed).run(calls)


def metric_values(router: RouterProcess) -> dict[str, float]:
    """Return the external metrics of `prometheus-adapter.yaml` that exist now, by series."""
    values = {f'baton_desired_replicas{{role="{role}"}}': float(count) for role, count in router.desired.items()}
    reports = {
        role: [each.report for each in router.cluster.workers if each.report is not None and each.role is role]
        for role in WorkerRole
    }
    if reports[PREFILL]:
        values["baton_prefill_waiting"] = float(sum(each.waiting_requests for each in reports[PREFILL]))
    if reports[DECODE]:
        shares = [each.pages.held / each.pages.total for each in reports[DECODE]]
        values["baton_decode_kv_usage"] = sum(shares) / len(shares)
    return values


def reversals(changes: Sequence[RoleChange], within_s: float) -> int:
    """Count the changes of a role that are undone by the next change within a time."""
    return sum(a.to is not b.to and b.at_s - a.at_s < within_s for a, b in pairwise(changes))


def turns(numbers: Sequence[int]) -> int:
    """Count the changes of direction of a number over time."""
    steps = [b - a for a, b in pairwise(numbers) if a != b]
    return sum(a * b < 0 for a, b in pairwise(steps))


def followed_s(changes: Sequence[RoleChange], shift_s: float, to: WorkerRole) -> float:
    """Return the time from a shift of the load to the first change to `to` after it; infinite if there is none."""
    return next((each.at_s - shift_s for each in changes if each.at_s >= shift_s and each.to is to), math.inf)
