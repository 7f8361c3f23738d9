"""One route as an ASGI application: body, message, work, reply; and the handling of errors on the way."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Generic, TypeVar

from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from baton.gateway.http.body import Body, BodyReader, ClientGone
from baton.gateway.http.call import REQUEST_ID_HEADER, Call, call_of, current_call
from baton.gateway.http.guard import caller_of
from baton.gateway.http.problem import Problem, Renamed, check_method, check_query, problem_of
from baton.gateway.http.reply import Reply, Stalled, refuse, send_reply, unless_gone
from baton.gateway.http.server import abort_of
from baton.gateway.parsing.parser import Parser
from baton.gateway.requests import names_of
from baton.router.trace.record import Leave, Outcome, RequestEnd, end_of, left
from baton.service.errors import BatonError
from baton.service.telemetry.trace_context import TraceContext, current_request_id, current_trace

Message = TypeVar("Message", bound=BaseModel)

logger = logging.getLogger(__name__)


Refuse = Callable[[TraceContext | None, RequestEnd], None]


@dataclass(frozen=True, slots=True)
class Transport:
    """The means, shared by all routes, by which bytes come and go."""

    bodies: BodyReader
    parser: Parser
    stall_s: float


class Endpoint(Generic[Message]):
    """Answers POSTs of one type of message."""

    def __init__(
        self,
        message_type: type[Message],
        answer: Callable[[Message, Call], Awaitable[Reply]],
        transport: Transport,
        renamed: Renamed,
        refuse: Refuse | None = None,
    ) -> None:
        """`refuse` is called for calls that end before they are requests; None: these never are."""
        self.message_type = message_type
        self._answer = answer
        self._transport = transport
        self._renamed = renamed
        self.observers: list[Callable[[Call, Problem], None]] = []
        """Called with every refusal, before it is sent."""
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        call = call_of(headers, caller_of(scope))
        current_trace.set(call.trace)
        current_request_id.set(call.request_id)
        current_call.set(call)
        headers_sent = {REQUEST_ID_HEADER: call.request_id}
        stall_s = self._transport.stall_s
        try:
            try:
                check_method(scope, "POST")
                check_query(scope)
                with await self._transport.bodies.read(headers, receive) as body:
                    await unless_gone(receive, self._respond(body, call, send))
            except Problem as problem:
                self._ended(call, _end_of(problem))
                for observe in self.observers:
                    observe(call, problem)
                await refuse(problem, receive, send, headers_sent, stall_s)
        except ClientGone:
            self._ended(call, left(Leave.CLIENT))
            logger.info("the client has gone")
        except Stalled:
            logger.warning("the client read nothing of its answer for %g s", stall_s)
            abort_of(scope)()

    def _ended(self, call: Call, end: RequestEnd) -> None:
        """The call has ended so. Requests that were begun for it are counted already."""
        if self._refuse is not None and call.reader.requests == 0:
            self._refuse(call.trace, end)

    async def _respond(self, body: Body, call: Call, send: Send) -> None:
        """Raises: Problem, as long as nothing has been sent."""
        try:
            message = await self._transport.parser.parse(self.message_type, body.parts)
            body.release()  # it may be large, and the answer long
            await self._reply(message, call, send)
        except (Problem, Stalled):
            raise
        except Exception as error:
            logger.exception("%s failed", self.message_type.__name__)
            raise Problem(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error", code="unexpected") from error

    async def _reply(self, message: Message, call: Call, send: Send) -> None:
        """Raises: Problem, Stalled."""
        headers_sent = {REQUEST_ID_HEADER: call.request_id}
        try:
            reply = await self._answer(message, call)
            await send_reply(reply, send, headers_sent, self._transport.stall_s, call.reader)
        except BatonError as error:
            raise problem_of(error, names_of(message, self._renamed)) from error


def _end_of(problem: Problem) -> RequestEnd:
    """The router's error, or a fault of this program, is the cause of its problem."""
    cause = problem.__cause__
    if isinstance(cause, BatonError) or (cause is not None and problem.status is HTTPStatus.INTERNAL_SERVER_ERROR):
        return end_of(cause, dispatched=False)
    return RequestEnd(Outcome.REFUSED, problem.cause, problem.status.name)
