"""Causes of delays of an event loop: other work on the loop, or no free core."""

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

PERIOD_S = 0.02
LEAST_S = 0.002  # shortest recorded delay
KEPT = 4096
CONTENDED_LOOKS = 32  # number of checks that include other threads, after the loop's thread waited for a core


class Delay(NamedTuple):
    """Parts of a delay, in seconds."""

    busy_s: float  # time in which the loop was busy with other work
    queued_s: float  # time in which the loop's thread, or others of the process, waited for a core


class _Look(NamedTuple):
    """Delay of the loop between two checks. `began_s` and `ended_s`: times of the checks, in monotonic seconds."""

    began_s: float
    ended_s: float
    delay: Delay


class LoopLag:
    """Meter of an event loop's delays, which checks 50 times per second; a check takes 0.1 ms."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        own_queued_s: Callable[[], float],
        others_share: Callable[[], float],
    ) -> None:
        """Create a meter. `own_queued_s`: total time that the loop's thread has waited for a core. `others_share`:
        share of recent time that other threads of the process waited for a core.
        """
        self._loop = loop
        self._own_queued_s, self._others_share = own_queued_s, others_share
        self._own_s = own_queued_s()
        self._looks: deque[_Look] = deque(maxlen=KEPT)
        self._timer: asyncio.TimerHandle | None = None
        self._last_s = loop.time()
        self._contended = 0
        self.busy_s = 0.0
        """Total busy time of all checks, in seconds."""

    def start(self) -> None:
        self._last_s = self._loop.time()
        self._wait()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def between(self, began_s: float, ended_s: float) -> Delay:
        """Return the measured delay between two moments. The first and the last interval between two checks count in
        proportion to their part between the moments.
        """
        busy_s = queued_s = 0.0
        first = bisect_right(self._looks, began_s, key=lambda look: look.ended_s)
        for look in islice(self._looks, first, None):
            if look.began_s >= ended_s:
                break
            overlap_s = min(look.ended_s, ended_s) - max(look.began_s, began_s)
            busy_s += min(overlap_s, look.delay.busy_s)
            queued_s += look.delay.queued_s * overlap_s / (look.ended_s - look.began_s)
        return Delay(busy_s, queued_s)

    def _wait(self) -> None:
        due_s = self._loop.time() + PERIOD_S
        self._timer = self._loop.call_at(due_s, self._look, due_s)

    def _look(self, due_s: float) -> None:
        self._wait()  # first, so that checks continue if this check fails
        now, own_s = self._loop.time(), self._own_queued_s()
        if now <= self._last_s:
            return  # same millisecond of uvloop's clock: the next check includes this interval
        late_s, own_queued_s = now - due_s, own_s - self._own_s
        self._contended = CONTENDED_LOOKS if own_queued_s >= LEAST_S else max(0, self._contended - 1)
        queued_s = own_queued_s
        if self._contended:
            queued_s = max(own_queued_s, self._others_share() * (now - self._last_s))
        if late_s >= LEAST_S or queued_s >= LEAST_S:
            busy_s = max(0.0, late_s - own_queued_s)
            self._looks.append(_Look(self._last_s, now, Delay(busy_s, queued_s)))
            self.busy_s += busy_s
        self._last_s, self._own_s = now, own_s
