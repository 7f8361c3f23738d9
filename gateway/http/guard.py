"""Before all routes: nothing is read or answered for a caller that is not allowed. The needs of routes are here."""

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.gateway.http.body import ClientGone
from baton.gateway.http.problem import problem_of
from baton.gateway.http.reply import Stalled, refuse
from baton.gateway.page.files import is_public
from baton.router.public.access import Access, Caller, Need
from baton.service.errors import BatonError

NEEDS = {"/health": Need.NOTHING, "/metrics": Need.ADMIN}
"""The files of the page need nothing either. All others need a key, those that there are not too."""

_CALLER = "baton.caller"


class Guard:
    """An ASGI application around another one."""

    def __init__(
        self, app: ASGIApp, access: Access, stall_s: float, refused: Callable[[str, BatonError], None]
    ) -> None:
        """`refused` is called with the path of each refused call."""
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
            problem.ends_connection = True  # there may be a body, which is not read
            try:
                await refuse(problem, receive, send, {}, self._stall_s)
            except (ClientGone, Stalled):
                return
            return
        await self._app(scope, receive, send)


def caller_of(scope: Scope) -> Caller:
    """The caller, as the guard found it."""
    caller: Caller = scope[_CALLER]
    return caller
