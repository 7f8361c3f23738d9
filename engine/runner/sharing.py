"""How much of a GPU prefill takes beside decode.

Two processes take turns on a GPU: a step of decode waits while prefill's kernels run. Smaller chunks leave more gaps,
in which the host prepares the next one; where that is not enough prefill rests after each.
"""

import time
from collections.abc import Callable

MIN_TOKENS = 256  # of a chunk: below that weights are read for too few rows
MAX_REST = 1.0  # times the chunk before it
REST_STEP = 0.25
GROWTH = 1.25
COMFORT_SHARE = 0.9  # below this share of the target there is room for more
SILENCE_S = 2.0  # after which no worker decodes here any more


class DeviceShare:
    """Chunk size and rest, so that decode's steps take about `target` times as long as without prefill."""

    def __init__(self, most_tokens: int, target: float) -> None:
        """`most_tokens`: of a chunk. `target`: at least 1."""
        if target < 1.0:
            raise ValueError(f"the target is {target}; a step cannot become shorter than without prefill")
        self._most_tokens = most_tokens
        self._least_tokens = min(MIN_TOKENS, most_tokens)
        self._target = target
        self._tokens = most_tokens
        self._rest = 0.0
        self._heard_at: float | None = None

    def observe_slow_down(self, slow_down: float, now: float) -> None:
        """A decode worker on this GPU reports how much longer its steps take; `now`: monotonic seconds."""
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
        """How long to do nothing after a chunk that took so long."""
        self._forget(now)
        return self._rest * chunk_s

    def _forget(self, now: float) -> None:
        if self._heard_at is not None and now - self._heard_at > SILENCE_S:
            self._tokens, self._rest, self._heard_at = self._most_tokens, 0.0, None


MAX_REST_S = 0.05  # at a time: meanwhile nothing is called off, and no prompt begins


class PrefillThrottle:
    """Rests come before a step, so that the last step's results have been handed on."""

    def __init__(
        self,
        share: DeviceShare,
        now: Callable[[], float] = lambda: time.monotonic(),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._share, self._now, self._sleep = share, now, sleep
        self._rested_at = 0.0  # when the next step may begin

    def rest(self) -> None:
        if (rest_s := self._rested_at - self._now()) > 0:
            self._sleep(min(rest_s, MAX_REST_S))

    def observe(self, step_s: float) -> int:
        """A step took so long. Returns the tokens of the next chunk, at most."""
        now = self._now()
        self._rested_at = now + self._share.rest_s(step_s, now)
        return self._share.chunk_tokens(now)

    def observe_slow_down(self, slow_down: float) -> None:
        """A decode worker on this GPU reports how many times as long its steps take as at their best."""
        self._share.observe_slow_down(slow_down, self._now())
