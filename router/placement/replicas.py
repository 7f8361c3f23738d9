"""Desired number of workers of each role, computed from the role's pressure, and stable enough for an autoscaler. Pure.

The momentary need is the number of workers that brings the pressure to TARGET. The desired number rises if the need
was higher throughout `up_s`, at most to twice the number of serving workers. It falls by one, at most once per
`step_s`, if the need was lower by the margin SPARE throughout `down_s`. So short peaks and lulls change nothing.
"""

import math
from collections import deque
from dataclasses import dataclass

from baton.process.registry.worker_record import WorkerRole
from baton.router.placement.planner import MOST_FOR_WAITING, Pressure, Situation

TARGET = 0.8
"""Target pressure, as a fraction of what the SLOs allow. The rest is for load that grows while new workers start."""
LEAST_ROOM = 0.2
"""Minimum fraction of the TTFT objective that counts as available for queueing, even if a prompt's own computation
takes most of it.
"""
SPARE = 0.1
"""Headroom below TARGET, as a fraction, that must remain with one worker less."""
MOST_WORKERS = 1024


@dataclass(frozen=True, slots=True)
class ReplicaTiming:
    up_s: float = 15.0
    down_s: float = 300.0
    step_s: float = 60.0


def wanted(pressure: Pressure, workers: int) -> float:
    """Return the number of workers, not rounded, that brings the pressure to TARGET.

    The part of the pressure that more workers would not reduce is ignored.
    """
    floor = min(pressure.floor, pressure.level)
    waiting = (pressure.level - floor) / max(LEAST_ROOM, TARGET - floor)
    return workers * max(min(MOST_FOR_WAITING, waiting), pressure.shared / TARGET)


class _Extremes:
    """Minimum or maximum of the values added in the last `window_s`. Calls take amortised constant time."""

    def __init__(self, window_s: float, is_highest: bool) -> None:
        self._window_s = window_s
        self._sign = 1.0 if is_highest else -1.0
        self._kept: deque[tuple[float, float]] = deque()
        self._since_s: float | None = None

    def add(self, value: float, now: float) -> None:
        self._since_s = now if self._since_s is None else self._since_s
        while self._kept and self._sign * self._kept[-1][1] <= self._sign * value:
            self._kept.pop()
        self._kept.append((now, value))
        while self._kept[0][0] < now - self._window_s:
            self._kept.popleft()

    def value(self, now: float) -> float | None:
        """Return the minimum or maximum; None until a complete window was observed."""
        if self._since_s is None or now - self._since_s < self._window_s:
            return None
        return self._kept[0][1]


class RoleReplicas:
    """Desired replicas of one role.

    The first value is the present number of workers, so that a new router changes nothing.
    """

    def __init__(self, timing: ReplicaTiming = ReplicaTiming()) -> None:
        self._timing = timing
        self._lowest, self._highest = _Extremes(timing.up_s, False), _Extremes(timing.down_s, True)
        self._changed_s = -math.inf
        self.number = 0  # desired number; 0 until a worker of this role was seen

    def look(self, pressure: Pressure, workers: int, now: float) -> int:
        """Record the present pressure and number of serving workers, and return the desired number."""
        if workers == 0:
            return self.number  # without workers there is no pressure to measure; requested workers may be starting
        self.number = self.number or workers
        number = wanted(pressure, workers)
        self._lowest.add(number, now)
        self._highest.add(number, now)
        self._up(workers, now)
        self._down(now)
        return self.number

    def _up(self, workers: int, now: float) -> None:
        lowest = self._lowest.value(now)
        if lowest is not None and lowest > self.number:
            # The limit is twice the serving workers, not the requested ones: more are requested only after these start.
            most = min(MOST_WORKERS, max(self.number, 2 * workers))
            self._change(min(math.ceil(lowest), most), now)

    def _down(self, now: float) -> None:
        highest = self._highest.value(now)
        fewer = self.number - 1
        if highest is None or fewer < 1 or now - self._changed_s < self._timing.step_s:
            return
        if highest <= fewer * (1 - SPARE):
            self._change(fewer, now)

    def _change(self, number: int, now: float) -> None:
        if number != self.number:
            self.number, self._changed_s = number, now


class Replicas:
    """Desired replicas of both roles."""

    def __init__(self, timing: ReplicaTiming = ReplicaTiming()) -> None:
        self._roles = {role: RoleReplicas(timing) for role in WorkerRole}

    def look(self, situation: Situation, now: float) -> None:
        self._roles[WorkerRole.PREFILL].look(situation.prefill, situation.prefill_workers, now)
        self._roles[WorkerRole.DECODE].look(situation.decode, situation.decode_workers, now)

    @property
    def desired(self) -> dict[WorkerRole, int]:
        """Desired number for each role that some worker has had: a cluster without prefill workers gets none."""
        return {role: each.number for role, each in self._roles.items() if each.number}
