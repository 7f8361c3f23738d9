"""Before all routes: nothing is read or answered for who may not ask. Which routes ask for what, is said here."""

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.body import ClientGone
from gateway.page.files import is_public
from gateway.problem import problem_of
from gateway.reply import Stalled, refuse
from router.access import Access, Caller, Need
from service.errors import BatonError

NEEDS = {"/health": Need.NOTHING, "/metrics": Need.ADMIN}
"""The files of the page need nothing either. All others need a key, those that there are not too."""

_CALLER = "baton.caller"


class Guard:
    """An ASGI application around another one."""

    def __init__(
        self, app: ASGIApp, access: Access, stall_s: float, refused: Callable[[str, BatonError], None]
    ) -> None:
        """`refused` is told the path of what may not be called."""
        self._app = app
        self._access = access
        self._stall_s = stall_s
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        need = Need.NOTHING if is_public(scope) else NEEDS.get(scope["path"], Need.KEY)
        try:
            scope[_CALLER] = self._access.caller(need, Headers(scope=scope).items())
        except BatonError as error:
            self._refused(scope["path"], error)
            problem = problem_of(error, {})
            problem.ends_connection = True  # there may be a body, which nobody reads
            try:
                await refuse(problem, receive, send, {}, self._stall_s)
            except (ClientGone, Stalled):
                return
            return
        await self._app(scope, receive, send)


def caller_of(scope: Scope) -> Caller:
    """Who asks, as the guard found out."""
    caller: Caller = scope[_CALLER]
    return caller
