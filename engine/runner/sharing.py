"""Limits on prefill work on a GPU that decode workers also use.

Two processes take turns on a GPU: a decode step waits while prefill kernels run. Smaller prefill
chunks leave more gaps for decode steps. If these gaps are not enough, prefill pauses after each chunk.
"""

import time
from collections.abc import Callable

MIN_TOKENS = 256  # minimum chunk size; for smaller chunks, reading the weights takes most of the time
MAX_REST = 1.0  # longest pause after a chunk, as a multiple of the chunk's time
REST_STEP = 0.25
GROWTH = 1.25
COMFORT_SHARE = 0.9  # slow-down of decode steps below which prefill work may grow, as a fraction of the target
SILENCE_S = 2.0  # time without a report after which decode workers are assumed not to use the GPU


class DeviceShare:
    """Chunk size and pause of prefill that limit the slow-down of decode steps to about `target`.

    The slow-down is the time of a decode step divided by its time without prefill.
    """

    def __init__(self, most_tokens: int, target: float) -> None:
        """Start without limits. `most_tokens`: maximum chunk size. `target`: target slow-down, at least 1."""
        if target < 1.0:
            raise ValueError(f"target: {target} is below 1; a decode step cannot be faster than without prefill")
        self._most_tokens = most_tokens
        self._least_tokens = min(MIN_TOKENS, most_tokens)
        self._target = target
        self._tokens = most_tokens
        self._rest = 0.0
        self._heard_at: float | None = None

    def observe_slow_down(self, slow_down: float, now: float) -> None:
        """Record the slow-down that a decode worker on this GPU reports. `now`: monotonic seconds."""
        self._heard_at = now
        if slow_down > self._target:
            if self._tokens > self._least_tokens:
                self._tokens = max(self._least_tokens, int(self._tokens * max(0.5, self._target / slow_down)))
            else:
                self._rest = min(MAX_REST, self._rest + REST_STEP)
        elif slow_down < COMFORT_SHARE * self._target:
            if self._rest > 0.0:
                self._rest = max(0.0, self._rest - REST_STEP)
            else:
                self._tokens = min(self._most_tokens, int(self._tokens * GROWTH) + 1)

    def chunk_tokens(self, now: float) -> int:
        self._forget(now)
        return self._tokens

    def rest_s(self, chunk_s: float, now: float) -> float:
        """Return the pause after a chunk of `chunk_s` seconds."""
        self._forget(now)
        return self._rest * chunk_s

    def _forget(self, now: float) -> None:
        if self._heard_at is not None and now - self._heard_at > SILENCE_S:
            self._tokens, self._rest, self._heard_at = self._most_tokens, 0.0, None


MAX_REST_S = 0.05  # longest pause, in which no cancellation or new prompt is handled


class PrefillThrottle:
    """Pauses between prefill steps. A pause begins when the results of the previous step are delivered."""

    def __init__(
        self,
        share: DeviceShare,
        now: Callable[[], float] = lambda: time.monotonic(),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._share, self._now, self._sleep = share, now, sleep
        self._rested_at = 0.0  # earliest start of the next step

    def rest(self) -> None:
        if (rest_s := self._rested_at - self._now()) > 0:
            self._sleep(min(rest_s, MAX_REST_S))

    def observe(self, step_s: float) -> int:
        """Record the time of a step. Returns the maximum tokens of the next chunk."""
        now = self._now()
        self._rested_at = now + self._share.rest_s(step_s, now)
        return self._share.chunk_tokens(now)

    def observe_slow_down(self, slow_down: float) -> None:
        """Record the slow-down that a decode worker on this GPU reports."""
        self._share.observe_slow_down(slow_down, self._now())
