"""Events of a request from its timers, the admission queue and the client. Worker events are in types/events.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from baton.process.errors import BatonError
from baton.router.admission.queue import Admitted
from baton.router.request.resume import AttemptLocation
from baton.router.types.placement import PlacementRequest


class RequestPhase(Enum):
    """Phase of a request over all its attempts."""

    PREPARED = auto()
    RUNNING = auto()
    COMPLETED = auto()
    FAILED = auto()
    CANCELLED = auto()


@dataclass(frozen=True, slots=True)
class Begun:
    """Event: the request starts. `locations`: another router's attempts that this request can adopt."""

    locations: Sequence[AttemptLocation] = ()


@dataclass(frozen=True, slots=True)
class TurnCame:
    """Event: a suspected request may run, because no other suspected request runs."""

    attempt_id: int


@dataclass(frozen=True, slots=True)
class Placed:
    """Event: the queue has placed the attempt and charged its workers.

    `began_s`: time of submission, monotonic seconds.
    """

    attempt_id: int
    asked: PlacementRequest
    admitted: Admitted
    began_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """Event: the queue has rejected the attempt."""

    attempt_id: int
    error: BatonError


@dataclass(frozen=True, slots=True)
class KvOverdue:
    """Event: the report of the KV transfer did not arrive in time."""

    attempt_id: int


@dataclass(frozen=True, slots=True)
class RetryDue:
    """Event: the pause after a failure has passed. `died`: the attempt failed because a worker process is gone."""

    attempt_id: int
    died: bool


@dataclass(frozen=True, slots=True)
class Deadline:
    """Event: the request's deadline has passed."""


@dataclass(frozen=True, slots=True)
class Superseded:
    """Event: the request's weights were replaced, and its grace time has passed or no worker has the old ones."""

    error: BatonError


@dataclass(frozen=True, slots=True)
class RequestClosed:
    """Event: the client has left, or the answer failed.

    `phase`: final phase of the request, unless the request is already over.
    """

    phase: RequestPhase


OwnEvent = Begun | TurnCame | Placed | Refused | KvOverdue | RetryDue | Deadline | Superseded | RequestClosed
