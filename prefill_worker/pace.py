"""Plans carried out at the pace that a shared GPU allows: rests between chunks, and their size."""

import time
from collections.abc import Callable
from typing import Protocol

from engine.device_share import DeviceShare
from engine.engine import PlanRunner
from engine.plan import ChunkResult, Plan

MOST_REST_S = 0.05  # at a time: meanwhile nothing is called off, and no prompt begins


class Chunked(Protocol):
    chunk_tokens: int


class Pace:
    """A PlanRunner around another; rests come before a step, so that the last step's results have been handed on."""

    def __init__(
        self,
        runner: PlanRunner,
        scheduler: Chunked,
        share: DeviceShare,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._runner, self._scheduler, self._share = runner, scheduler, share
        self._now, self._sleep = now, sleep
        self._rested_at = 0.0  # when the next step may begin

    def run(self, plan: Plan) -> tuple[ChunkResult, ...]:
        if (rest_s := self._rested_at - self._now()) > 0:
            self._sleep(min(rest_s, MOST_REST_S))
        started = self._now()
        results = self._runner.run(plan)
        ended = self._now()
        self._rested_at = ended + self._share.rest_s(ended - started, ended)
        self._scheduler.chunk_tokens = self._share.chunk_tokens(ended)
        return results

    def hear(self, slow_down: float) -> None:
        """A decode worker on this GPU reports how many times as long its steps take as at their best."""
        self._share.hear(slow_down, self._now())
