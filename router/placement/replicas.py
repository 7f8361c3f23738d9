"""Desired number of workers of a role, by its pressure; steady, so that an autoscaler may follow it. Pure.

The number wanted now is what brings the pressure to TARGET. More workers are requested once all of `up_s` wanted more,
at most doubling their number. Fewer are requested once all of `down_s` wanted fewer with SPARE left over, one at a time
and at least `step_s` apart. So a peak shorter than `up_s` and a lull shorter than `down_s` change nothing, nor does
noise around a number that is just enough.
"""

import math
from collections import deque
from dataclasses import dataclass

from baton.process.registry.worker_record import WorkerRole
from baton.router.placement.planner import Pressure, Situation

TARGET = 0.8
"""Target share of the pressure that the SLOs allow: new workers take a while to start, and load grows meanwhile."""
LEAST_ROOM = 0.2
"""Minimum share of the allowed TTFT that a prompt may wait, even if its own computation takes most of it."""
MOST_FOR_WAITING = 1.25
"""Times the workers that serve: a queue says that they are too few, and its length not how many are missing."""
SPARE = 0.1
"""Required room below TARGET with fewer workers, as a share."""
MOST_WORKERS = 1024


@dataclass(frozen=True, slots=True)
class ReplicaTiming:
    up_s: float = 15.0
    down_s: float = 300.0
    step_s: float = 60.0


def wanted(pressure: Pressure, workers: int) -> float:
    """Workers that would have TARGET, not rounded. What no further worker would shorten asks for none."""
    floor = min(pressure.floor, pressure.level)
    waiting = (pressure.level - floor) / max(LEAST_ROOM, TARGET - floor)
    return workers * max(min(MOST_FOR_WAITING, waiting), pressure.shared / TARGET)


class _Extremes:
    """The lowest or highest value of the last `window_s`, in constant time on average."""

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
        """Return the value; None before it was observed long enough."""
        if self._since_s is None or now - self._since_s < self._window_s:
            return None
        return self._kept[0][1]


class RoleReplicas:
    """Replicas of one role, starting with the present workers, so that a router that starts changes nothing."""

    def __init__(self, timing: ReplicaTiming = ReplicaTiming()) -> None:
        self._timing = timing
        self._lowest, self._highest = _Extremes(timing.up_s, False), _Extremes(timing.down_s, True)
        self._changed_s = -math.inf
        self.number = 0  # 0: no worker of this role has been there yet

    def look(self, pressure: Pressure, workers: int, now: float) -> int:
        """Update with the present pressure. `workers`: that serve now."""
        if workers == 0:
            return self.number  # nothing is measured; those that were asked for are on their way
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
            # Twice those that serve, not twice those that were asked for: while none has come, none is added.
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
    """Replicas of both roles."""

    def __init__(self, timing: ReplicaTiming = ReplicaTiming()) -> None:
        self._roles = {role: RoleReplicas(timing) for role in WorkerRole}

    def look(self, situation: Situation, now: float) -> None:
        self._roles[WorkerRole.PREFILL].look(situation.prefill, situation.prefill_workers, now)
        self._roles[WorkerRole.DECODE].look(situation.decode, situation.decode_workers, now)

    @property
    def desired(self) -> dict[WorkerRole, int]:
        """Return the desired numbers, without roles that no worker has had yet: a cluster without prefill workers stays
        one.
        """
        return {role: each.number for role, each in self._roles.items() if each.number}
