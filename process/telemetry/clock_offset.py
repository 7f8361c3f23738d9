"""Offset of another process's clock, estimated from messages that travel there and back.

No two clocks are compared directly: the other process says when a message of ours came back to us, and how long it kept
it. As in NTP, the middle of our waiting is taken for the middle of its keeping; the error is half of the way's time.
"""

from collections import deque
from typing import NamedTuple

ROUNDING_S = 1e-5  # of clocks in messages
KEPT = 16  # estimates, of which the surest counts: clocks drift apart, so old ones are forgotten


class ClockOffset(NamedTuple):
    """Seconds. A time of this process plus `offset_s` is that of the other's clock, to within `error_s`."""

    offset_s: float
    error_s: float


class ClockEstimate:
    """Estimate of one other process's clock."""

    def __init__(self) -> None:
        self._kept: deque[ClockOffset] = deque(maxlen=KEPT)

    def take(self, sent_s: float, received_s: float, kept_s: float, other_s: float) -> None:
        """Our message left at `sent_s` and was answered at `received_s`, by our clock. The other process kept it for
        `kept_s`, and its clock said `other_s` as it answered.
        """
        way_s = (received_s - sent_s) - kept_s
        if way_s < -ROUNDING_S:  # a clock was set meanwhile
            return
        way_s = max(0.0, way_s)
        self._kept.append(ClockOffset(other_s - (received_s - way_s / 2), way_s / 2))

    @property
    def best(self) -> ClockOffset | None:
        """Return the best estimate; None if there is none yet."""
        return min(self._kept, key=lambda each: each.error_s, default=None)
