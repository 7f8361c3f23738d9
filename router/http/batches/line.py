"""Answers to single lines of a batch, computed by the same code as requests over HTTP."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

from baton.process.errors import BatonError, release_frames
from baton.process.objectives import MOST_SLO_MS
from baton.process.telemetry.trace_context import current_request_id, current_trace
from baton.router.dispatcher import Dispatcher
from baton.router.http.dialects import Body
from baton.router.http.edge.exchange import FullReply, Reply
from baton.router.http.edge.problem import Problem, problem_of, refused
from baton.router.http.parse_process import Parser
from baton.router.http.requests import HttpCall, current_call, names_of
from baton.router.model.validation import MOST_PRIORITY
from baton.router.public.access import Caller

LINE_PRIORITY = MOST_PRIORITY
"""Priority of all lines: after all other requests."""
_BEHIND = {"priority": LINE_PRIORITY, "ttft_slo_ms": MOST_SLO_MS, "tbt_slo_ms": MOST_SLO_MS}
"""Fields that let other requests go first, in queues and on workers."""
_RETRIED = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_MAX_PAUSE_S = 60.0

logger = logging.getLogger(__name__)


class LineRoute(NamedTuple):
    """Type of the bodies of an endpoint, and the function that answers them."""

    message_type: type[Body]
    answer: Callable[[Dispatcher, Any, HttpCall], Awaitable[Reply]]


class LineAnswer(NamedTuple):
    """Answer to a line, as an HTTP response. `retry_after_s`: None if a retry would get the same answer."""

    status: HTTPStatus
    request_id: str
    body: bytes
    retry_after_s: float | None = None

    @property
    def response(self) -> bytes:
        """Response in a line of output, in JSON."""
        return b'{"status_code": %d, "request_id": "%b", "body": %b}' % (
            self.status,
            self.request_id.encode(),
            self.body,
        )


class LineAnswerer:
    def __init__(self, dispatcher: Dispatcher, parser: Parser, routes: Mapping[str, LineRoute]) -> None:
        """Create an answerer. `routes`: by endpoint of a batch."""
        self._dispatcher = dispatcher
        self._parser = parser
        self._routes = routes

    async def answer(self, endpoint: str, body: bytes, caller: Caller) -> LineAnswer:
        """Answer a line. While workers, the queue or the API key's limits refuse it, retry until cancelled."""
        while (answer := await self._answer(endpoint, body, caller)).retry_after_s is not None:
            if self._dispatcher.draining:
                raise asyncio.CancelledError  # another router, or the next one, answers it
            await asyncio.sleep(min(answer.retry_after_s, _MAX_PAUSE_S))
        return answer

    async def _answer(self, endpoint: str, body: bytes, caller: Caller) -> LineAnswer:
        call = HttpCall(secrets.token_hex(12), caller, "", None)
        current_trace.set(None)
        current_request_id.set(call.request_id)
        current_call.set(call)
        try:
            reply = await self._reply(endpoint, body, call)
            return LineAnswer(reply.status, call.request_id, reply.body)
        except Problem as refusal:
            problem = refusal
            release_frames(problem)
        except Exception:  # last handler of the line: unexpected errors become status 500
            logger.exception("a line of a batch failed unexpectedly; it gets status 500")
            problem = Problem(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error", code="unexpected")
        pause_s = (problem.retry_after_s or 1.0) if problem.status in _RETRIED else None
        return LineAnswer(problem.status, call.request_id, problem.body, pause_s)

    async def _reply(self, endpoint: str, body: bytes, call: HttpCall) -> FullReply:
        """Parse a body and return the reply. Raises: Problem."""
        route = self._routes[endpoint]
        given = await self._parser.parse(route.message_type, [body])
        if getattr(given, "stream", None):
            raise refused("stream", "is not served in a batch, which has complete answers only; remove it")
        fields = {name: value for name, value in _BEHIND.items() if name in route.message_type.model_fields}
        message = given.model_copy(update=fields)
        try:
            reply = await route.answer(self._dispatcher, message, call)
        except BatonError as error:
            raise problem_of(error, names_of(message)) from error
        if not isinstance(reply, FullReply):
            raise TypeError(f"the answer of {endpoint} is a stream")
        return reply
