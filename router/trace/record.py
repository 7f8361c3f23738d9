"""The record of one request, from its arrival to its end, and how it ended: for trace, counters and page."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import grpc

from baton.router.trace.timeline import Timeline
from baton.router.types.events import NewTokens
from baton.router.types.request import Operation, PreparedRequest
from baton.router.types.response import AnswerEvent, Summary
from baton.service.errors import Aborted, BatonError
from baton.service.telemetry.spans import WallClock
from baton.service.telemetry.trace_context import TraceContext, new_trace


class AnswerStream(Protocol):
    """An Answer, or a wrapper of one."""

    @property
    def done(self) -> bool: ...
    @property
    def completion_tokens(self) -> int: ...
    def has_finished(self, index: int) -> bool: ...
    def take(self, new_tokens: NewTokens) -> Sequence[AnswerEvent]: ...


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


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Filled in on the request's way. `identity` is the root span's place in the trace."""

    operation: Operation
    parent: TraceContext | None
    identity: TraceContext
    clock: WallClock
    timeline: Timeline
    model: str = ""
    prepared: PreparedRequest | None = None
    finish_reasons: list[str] = field(default_factory=list)
    summary: Summary | None = None
    is_resumed: bool = False  # an answer that began in another stream
    answer: AnswerStream | None = None
    delivered_tokens: int = 0  # of deltas that went out
    end: RequestEnd | None = None  # None: it runs

    @property
    def error(self) -> str | None:
        """Name of the status that it ended with; None is OK."""
        return self.end.error if self.end is not None else None

    @property
    def prompt_tokens(self) -> int:
        """That a worker was given for this request, and not for one that it resumes."""
        given = self.prepared is not None and self.timeline.attempts and not self.is_resumed
        return len(self.prepared.token_ids) if self.prepared is not None and given else 0

    @property
    def completion_tokens(self) -> int:
        """Tokens that went out; of an answer that is sent only at its end, tokens that were made. Those that the client
        of a resumed stream had before are not included.
        """
        whole_at_once = self.prepared is not None and not self.prepared.valid.streams
        return self.answer.completion_tokens if whole_at_once and self.answer is not None else self.delivered_tokens

    @staticmethod
    def begin(operation: Operation, parent: TraceContext | None) -> "RequestRecord":
        clock = WallClock.now()
        identity = parent.child() if parent else new_trace()
        return RequestRecord(operation, parent, identity, clock, Timeline(arrived_s=clock.monotonic_s))
