"""Effects: actions that the pure state of a request asks the request's runner to perform."""

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
    """Effect: wait until no other suspected request runs, then send the event TurnCame."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Submit:
    """Effect: queue the attempt for capacity, then send the event Placed or Refused."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Effect: send the attempt to the placed workers."""

    attempt: Attempt
    placement: Placement


@dataclass(frozen=True, slots=True)
class Adopt:
    """Effect: adopt another router's attempt on the worker where it runs."""

    attempt: Attempt
    placement: Placement
    asked: PlacementRequest
    location: AttemptLocation


@dataclass(frozen=True, slots=True)
class RecordPrefill:
    """Effect: learn the prompt rate from a computed prompt, and release the prompt's charge."""

    attempt: Attempt
    timings: PrefillTimings


@dataclass(frozen=True, slots=True)
class RecordTransfer:
    """Effect: learn the KV size and the hits from a successful KV transfer."""

    attempt: Attempt
    kv_received: KvReceived


@dataclass(frozen=True, slots=True)
class AwaitKv:
    """Effect: wait a moment, then send KvOverdue.

    The answer is complete; only the timings of its transfer are missing.
    """

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class ClearSuspicion:
    """Effect: let other suspected requests run, because this one made progress."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Release:
    """Effect: release everything that the attempt holds.

    `cancels`: workers that may hold resources of the attempt. `keeps_kv`: the next attempt can use the KV on the decode
    worker. `answered`: all choices of the attempt are complete.
    """

    attempt: Attempt
    cancels: Sequence[str] = ()
    keeps_kv: bool = False
    answered: bool = False


@dataclass(frozen=True, slots=True)
class MarkDraining:
    """Effect: send no more requests to the worker, which drains."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class BackOff:
    """Effect: pause, wait until worker `settles` is known to be alive or gone (None: no wait), then send RetryDue."""

    attempt: Attempt
    failed: Failed
    pause_s: float
    settles: str | None


@dataclass(frozen=True, slots=True)
class RecordPairFailure:
    """Effect: count a failed transfer between two living workers. `pair`: endpoints (prefill, decode)."""

    pair: tuple[str, str]


@dataclass(frozen=True, slots=True)
class LogRetry:
    """Effect: log a failed attempt that is retried."""

    failed: Failed


@dataclass(frozen=True, slots=True)
class AddToQuarantine:
    """Effect: reject requests equal to this one from now on, because it kills workers."""

    failed: Failed


@dataclass(frozen=True, slots=True)
class Fail:
    """Effect: end the request with an error."""

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
