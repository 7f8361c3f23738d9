"""Effects: actions that a request's state requests from its runner."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.process.errors import BatonError
from baton.router.placement.decide import Placement
from baton.router.request.attempt import Attempt
from baton.router.request.resume import AttemptLocation
from baton.router.types.events import Failed, KvReceived, PrefillTimings
from baton.router.types.placement import PlacementRequest


@dataclass(frozen=True, slots=True)
class AwaitTurn:
    """Wait until no other suspected request runs; then TurnCame."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Submit:
    """Queue for capacity; then Placed or Refused."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the attempt to its workers."""

    attempt: Attempt
    placement: Placement


@dataclass(frozen=True, slots=True)
class Adopt:
    """Continue another router's attempt where it runs."""

    attempt: Attempt
    placement: Placement
    asked: PlacementRequest
    location: AttemptLocation


@dataclass(frozen=True, slots=True)
class RecordPrefill:
    """Learn from a computed prompt, and release its charge."""

    attempt: Attempt
    timings: PrefillTimings


@dataclass(frozen=True, slots=True)
class RecordTransfer:
    """Learn from a KV transfer."""

    attempt: Attempt
    kv_received: KvReceived


@dataclass(frozen=True, slots=True)
class AwaitKv:
    """Wait a moment, then KvOverdue: a complete answer lacks only the timings of its transfer."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class ClearSuspicion:
    """Let other suspected requests run: this one made progress."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Release:
    """Release everything that the attempt holds.

    `cancels`: workers that may hold something. `keeps_kv`: the next attempt can use its KV in decode. `answered`: all
    its choices are complete.
    """

    attempt: Attempt
    cancels: Sequence[str] = ()
    keeps_kv: bool = False
    answered: bool = False


@dataclass(frozen=True, slots=True)
class MarkDraining:
    """Send no more requests to the worker."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class BackOff:
    """Pause until it is known whether the worker `settles` comes back; then RetryDue."""

    attempt: Attempt
    failed: Failed
    pause_s: float
    settles: str | None


@dataclass(frozen=True, slots=True)
class RecordPairFailure:
    """Count a failed transfer between two workers that live: (prefill, decode)."""

    pair: tuple[str, str]


@dataclass(frozen=True, slots=True)
class LogRetry:
    """Log that other attempts follow."""

    failed: Failed


@dataclass(frozen=True, slots=True)
class AddToQuarantine:
    """Reject requests equal to this one from now on."""

    failed: Failed


@dataclass(frozen=True, slots=True)
class Fail:
    """End the request with an error."""

    error: BatonError


Effect = (
    AwaitTurn
    | Submit
    | Dispatch
    | Adopt
    | RecordPrefill
    | RecordTransfer
    | AwaitKv
    | ClearSuspicion
    | Release
    | MarkDraining
    | BackOff
    | RecordPairFailure
    | LogRetry
    | AddToQuarantine
    | Fail
)
