"""How a request ended: answered, cancelled, refused or failed, and why in one word. The one rule. Pure."""

import asyncio
from dataclasses import dataclass
from enum import StrEnum

import grpc

from service.errors import Aborted, BatonError

_UNEXPECTED = "unexpected"
_POISON = "poison"


class Outcome(StrEnum):
    ANSWERED = "answered"
    CANCELLED = "cancelled"  # its reader wanted no more of it, or was disconnected
    REFUSED = "refused"  # before any worker was given it
    FAILED = "failed"


class Leave(StrEnum):
    """Why a request was cancelled."""

    CLIENT = "client"  # cancelled the call, or closed the connection
    STALLED = "client_stalled"  # took nothing of the answer for too long
    SUPERSEDED = "superseded"  # another stream of the same request continues
    SIBLING = "sibling_failed"  # another prompt of the same call
    STOPPING = "router_stopped"


@dataclass(slots=True)
class Reader:
    """The reader of the answers to one call."""

    requests: int = 0
    """Requests that were begun for it: an end of the call before that is counted with none of them."""
    leaves: Leave = Leave.CLIENT
    """Why, if it leaves before the end. To be set by the one that makes it leave."""


@dataclass(frozen=True, slots=True)
class RequestEnd:
    outcome: Outcome
    reason: str = ""  # a lower-case word out of few; empty where it was answered
    status: str = "OK"  # name of the gRPC status

    @property
    def error(self) -> str | None:
        """The status, None where all is well."""
        return None if self.outcome is Outcome.ANSWERED else self.status


ANSWERED = RequestEnd(Outcome.ANSWERED)


def left(leaves: Leave) -> RequestEnd:
    return RequestEnd(Outcome.CANCELLED, leaves.value, "CANCELLED")


def end_of(error: BaseException, dispatched: bool) -> RequestEnd:
    """`dispatched`: a worker was given it. An error that is no BatonError is a fault of this program."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return left(Leave.CLIENT)
    if not isinstance(error, BatonError):
        return RequestEnd(Outcome.FAILED, _UNEXPECTED, grpc.StatusCode.INTERNAL.name)
    if isinstance(error, Aborted):
        return RequestEnd(Outcome.CANCELLED, error.cause, error.code.name)
    ours = error.code is grpc.StatusCode.INTERNAL and error.cause != _POISON
    return RequestEnd(Outcome.FAILED if dispatched or ours else Outcome.REFUSED, error.cause, error.code.name)
