"""One HTTP request, as far as its headers show."""

import secrets
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.datastructures import Headers

from baton.router.model.validation import MAX_REQUEST_ID_CHARACTERS
from baton.router.public.access import Caller
from baton.router.trace.record import Reader
from baton.router.types.request import session_of
from baton.service.telemetry.trace_context import TraceContext, parse_traceparent

REQUEST_ID_HEADER = "x-request-id"


@dataclass(frozen=True, slots=True)
class Call:
    request_id: str  # the client's own, or a new one
    caller: Caller
    session: str  # whose requests go to the same workers
    trace: TraceContext | None  # the caller's place in its trace
    reader: Reader = field(default_factory=Reader)


current_call: ContextVar[Call | None] = ContextVar("current_call", default=None)
"""The call that the current task answers; None outside a POST over HTTP."""


def call_of(headers: Headers, caller: Caller) -> Call:
    """A header that is no good is as if it were not there."""
    given = headers.get(REQUEST_ID_HEADER, "")
    usable = 0 < len(given) <= MAX_REQUEST_ID_CHARACTERS and given.isascii() and given.isprintable()
    return Call(
        request_id=given if usable else secrets.token_hex(12),
        caller=caller,
        session=session_of(headers.items()),
        trace=parse_traceparent(headers.get("traceparent"), headers.get("tracestate", "")),
    )
