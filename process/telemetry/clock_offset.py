"""Offset of another process's clock, estimated from messages that travel there and back.

The other process reports its clock when it answers, and how long it kept this process's message. As in NTP, both
directions are assumed to take equally long; the error is at most half of the travel time.
"""

from collections import deque
from typing import NamedTuple

ROUNDING_S = 1e-5  # rounding of clocks in messages
KEPT = 16  # number of kept estimates; older ones are dropped since clocks drift


class ClockOffset(NamedTuple):
    """Offset in seconds: time of the other clock = own time + `offset_s`, with an error of at most `error_s`."""

    offset_s: float
    error_s: float


class ClockEstimate:
    """Estimate of the offset of one other process's clock."""

    def __init__(self) -> None:
        self._kept: deque[ClockOffset] = deque(maxlen=KEPT)

    def take(self, sent_s: float, received_s: float, kept_s: float, other_s: float) -> None:
        """Record a round trip: message sent at `sent_s` and answer received at `received_s`, on this process's clock.

        The other process kept the message for `kept_s`; its own clock read `other_s` when it sent the answer.
        """
        way_s = (received_s - sent_s) - kept_s
        if way_s < -ROUNDING_S:  # negative, because a clock was set
            return
        way_s = max(0.0, way_s)
        self._kept.append(ClockOffset(other_s - (received_s - way_s / 2), way_s / 2))

    @property
    def best(self) -> ClockOffset | None:
        """Return the estimate with the least error; None if there is none."""
        return min(self._kept, key=lambda each: each.error_s, default=None)
