"""Events that a request's own timers, queue and client cause. Worker events are in types/events.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from baton.process.errors import BatonError
from baton.router.admission.queue import Admitted
from baton.router.request.resume import AttemptLocation
from baton.router.types.placement import PlacementRequest


class RequestPhase(Enum):
    """Phase of a request."""

    PREPARED = auto()
    RUNNING = auto()
    COMPLETED = auto()
    FAILED = auto()
    CANCELLED = auto()


@dataclass(frozen=True, slots=True)
class Begun:
    """Event: the request starts. `locations`: another router's attempts that can be adopted."""

    locations: Sequence[AttemptLocation] = ()


@dataclass(frozen=True, slots=True)
class TurnCame:
    """Event: a suspected request may run, since no other one does."""

    attempt_id: int


@dataclass(frozen=True, slots=True)
class Placed:
    """Event: the queue has charged the attempt on its workers. `began_s`: time of submission."""

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
    """Event: the pause after a failure has passed. `died`: the attempt's worker process is gone."""

    attempt_id: int
    died: bool


@dataclass(frozen=True, slots=True)
class Deadline:
    """Event: the request's deadline has passed."""


@dataclass(frozen=True, slots=True)
class Superseded:
    """Event: the request's weights were replaced, and its grace has passed or no worker has them."""

    error: BatonError


@dataclass(frozen=True, slots=True)
class Delivered:
    """Event: the answer has processed all new tokens."""


@dataclass(frozen=True, slots=True)
class RequestClosed:
    """Event: the client has left, or the answer failed. `phase`: new phase of a request that is not over."""

    phase: RequestPhase


OwnEvent = (
    Begun | TurnCame | Placed | Refused | KvOverdue | RetryDue | Deadline | Superseded | Delivered | RequestClosed
)
