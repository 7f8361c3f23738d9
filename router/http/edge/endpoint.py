"""ASGI applications of single routes: they check access, read and parse the body, reply, and handle errors."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Generic, TypeVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.process.errors import BatonError, release_frames
from baton.process.telemetry.trace_context import TraceContext, current_request_id, current_trace
from baton.router.http.dialects import ADVISING_HEADERS, NOT_ACTED_UPON, Body, accepted_without_effect, header_value
from baton.router.http.edge.connection import abort_of
from baton.router.http.edge.exchange import (
    BodyReader,
    ClientGone,
    FullReply,
    Reply,
    RequestBody,
    Stalled,
    problem_reply,
    refuse,
    send_reply,
    unless_gone,
)
from baton.router.http.edge.problem import (
    Dialect,
    Problem,
    check_content,
    check_method,
    check_query,
    check_upgrade,
    dialect_of,
    problem_of,
)
from baton.router.http.edge.sites import SiteRules
from baton.router.http.page.files import is_public
from baton.router.http.parse_process import Parser
from baton.router.http.requests import REQUEST_ID_HEADER, HttpCall, call_of, current_call, names_of
from baton.router.public.access import Access, Caller, Need
from baton.router.trace.record import Leave, RequestEnd, RequestOutcome, end_of, left

logger = logging.getLogger(__name__)

NEEDS = {
    "/health": Need.NOTHING,
    "/ready": Need.NOTHING,
    "/metrics": Need.ADMIN,
    "/v1/load_lora_adapter": Need.ADMIN,
    "/v1/unload_lora_adapter": Need.ADMIN,
}
"""Permission by path. Files of the page require nothing; all other paths, existing or not, require a key."""

HARMLESS_QUERY: dict[Dialect, tuple[str, ...]] = {Dialect.ANTHROPIC: ("beta",)}
"""Query parameters that clients of an API add, and that are ignored."""

_CALLER = "baton.caller"


class Guard:
    """ASGI application that checks the caller's access, and then calls another application."""

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        sites: SiteRules,
        refused: Callable[[str, BatonError], None],
    ) -> None:
        """Wrap `app`. `sites`: rules for Host and Origin headers, for a router without API keys. `refused`: called with
        path and error of a rejected call.
        """
        self._app = app
        self._access = access
        self._sites = sites
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        need = Need.NOTHING if is_public(scope) else NEEDS.get(scope["path"], Need.KEY)
        try:
            if not self._access.is_guarded:
                self._sites.check(scope)
            scope[_CALLER] = self._access.caller(need, Headers(scope=scope).items())
        except BatonError as error:
            self._refused(scope["path"], error)
            problem = problem_of(error, {})
            problem.dialect = dialect_of(scope["path"])
            problem.ends_connection = True  # the connection must close, since the body is not read
            with suppress(Stalled):
                await refuse(problem, receive, send, {})
            return
        await self._app(scope, receive, send)


def caller_of(scope: Scope) -> Caller:
    """Return the caller of a request, as identified by the Guard."""
    caller: Caller = scope[_CALLER]
    return caller


Message = TypeVar("Message", bound=Body)


Refuse = Callable[[TraceContext | None, RequestEnd], None]
Observe = Callable[[HttpCall, Problem], None]


def _unreported(*call_and_end: object) -> None:
    """Report nothing."""


@dataclass(frozen=True, slots=True)
class HttpTransport:
    """Reader and parser of bodies, shared by all routes."""

    bodies: BodyReader
    parser: Parser


class PostEndpoint(ABC):
    """ASGI application that answers POSTs. A subclass reads the body."""

    def __init__(self, transport: HttpTransport, refuse: Refuse = _unreported, observe: Observe = _unreported) -> None:
        """Create the endpoint. `refuse`: called for each call that ends before it becomes a request. `observe`: called
        with each error before it is sent.
        """
        self.transport = transport
        self._refuse = refuse
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        call = call_of(headers, caller_of(scope))
        call.reader.not_acted_upon += [name for name in ADVISING_HEADERS if name in headers]
        current_trace.set(call.trace)
        current_request_id.set(call.request_id)
        current_call.set(call)
        headers_sent = {REQUEST_ID_HEADER: call.request_id}
        dialect = dialect_of(scope["path"])
        try:
            try:
                check_upgrade(headers)
                check_method(scope, "POST")
                check_query(scope, HARMLESS_QUERY.get(dialect, ()))
                await self._handle(headers, call, receive, send)
            except Problem as problem:
                problem.dialect = dialect
                self._ended(call, _end_of(problem))
                self._observe(call, problem)
                await refuse(problem, receive, send, headers_sent)
                release_frames(problem)
        except ClientGone:
            self._ended(call, left(Leave.CLIENT))
            logger.info("client disconnected; the request is cancelled")
        except Stalled as stalled:
            logger.warning("client stalled: %s; closing the connection", stalled)
            abort_of(scope)()

    @abstractmethod
    async def _handle(self, headers: Headers, call: HttpCall, receive: Receive, send: Send) -> None:
        """Read the body and answer it. Raises: Problem if nothing was sent yet, ClientGone, Stalled."""

    def _ended(self, call: HttpCall, end: RequestEnd) -> None:
        """Report the end of a call that did not become a request. The end of a request is reported elsewhere."""
        if call.reader.requests == 0:
            self._refuse(call.trace, end)


class Endpoint(PostEndpoint, Generic[Message]):
    """ASGI application that answers POSTs with one type of body (`message_type`)."""

    def __init__(
        self,
        message_type: type[Message],
        answer: Callable[[Message, HttpCall], Awaitable[Reply]],
        transport: HttpTransport,
        refuse: Refuse = _unreported,
        observe: Observe = _unreported,
    ) -> None:
        super().__init__(transport, refuse, observe)
        self.message_type = message_type
        self._answer = answer

    async def _handle(self, headers: Headers, call: HttpCall, receive: Receive, send: Send) -> None:
        check_content(headers)
        with await self.transport.bodies.read(headers, receive) as body:
            await unless_gone(receive, self._respond(body, call, send))

    async def _respond(self, body: RequestBody, call: HttpCall, send: Send) -> None:
        """Parse the body and send the answer. Raises: Problem if nothing was sent yet, Stalled."""
        try:
            message = await self.transport.parser.parse(self.message_type, body.parts)
            body.release()  # frees its memory, which may be large, before a long answer
            await self._reply(message, call, send)
        except (Problem, Stalled):
            raise
        except Exception as error:  # last handler of every call: unexpected errors become status 500
            logger.exception("%s failed unexpectedly; the client gets status 500", self.message_type.__name__)
            raise Problem(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error", code="unexpected") from error

    async def _reply(self, message: Message, call: HttpCall, send: Send) -> None:
        """Create the answer to the message and send it. Raises: Problem, Stalled."""
        headers_sent, ignored = {REQUEST_ID_HEADER: call.request_id}, call.reader.not_acted_upon
        ignored += accepted_without_effect(message)
        try:
            reply = await self._answer(message, call)
            if ignored:
                headers_sent[NOT_ACTED_UPON] = header_value(ignored)
            await send_reply(reply, send, headers_sent, call.reader)
        except BatonError as error:
            raise problem_of(error, names_of(message)) from error


def _end_of(problem: Problem) -> RequestEnd:
    """Return the end of a call with this problem: that of the BatonError or unexpected cause, else REFUSED."""
    cause = problem.__cause__
    if isinstance(cause, BatonError) or (cause is not None and problem.status is HTTPStatus.INTERNAL_SERVER_ERROR):
        return end_of(cause, dispatched=False)
    return RequestEnd(RequestOutcome.REFUSED, problem.cause, problem.status.name)


class QueryEndpoint:
    """ASGI application that answers requests without a body, such as GET."""

    def __init__(
        self,
        answer: Callable[[Scope], Awaitable[Reply]],
        parameters: Collection[str] = (),
        methods: Sequence[str] = ("GET", "HEAD"),
    ) -> None:
        """Create the endpoint. `parameters`: names of accepted query parameters."""
        self._answer = answer
        self._parameters = parameters
        self._methods = methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {REQUEST_ID_HEADER: call_of(Headers(scope=scope), caller_of(scope)).request_id}
        try:
            check_method(scope, *self._methods)
            if not is_public(scope):  # page files: links to them may have any parameters
                check_query(scope, self._parameters)
            reply = await self._answer(scope)
        except BatonError as error:
            reply = _refusal(problem_of(error, {}), scope)
        except Problem as problem:
            reply = _refusal(problem, scope)
        await send_reply(reply, send, headers)


class PostOr:
    """ASGI application of a path that has a POST and a GET."""

    def __init__(self, post: ASGIApp, other: ASGIApp) -> None:
        """Create the application. `other` answers all methods except POST."""
        self._post = post
        self._other = other

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._post if scope["method"] == "POST" else self._other)(scope, receive, send)


class UnknownPath:
    """ASGI application for unknown paths: it answers with status 404."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        """Create the application. `reasons`: by path of another server's API, why it is not served here."""
        self._reasons = reasons

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, reason = scope["path"], self._reasons.get(scope["path"])
        message = f"unknown path {path[:200]}" + (f": {reason}" if reason else "")
        problem = Problem(HTTPStatus.NOT_FOUND, message, code="unknown_path")
        await send_reply(_refusal(problem, scope), send, {})


def _refusal(problem: Problem, scope: Scope) -> FullReply:
    problem.dialect = dialect_of(scope["path"])
    return problem_reply(problem)
