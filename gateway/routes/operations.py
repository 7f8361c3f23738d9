"""Routes without a body: the models that are served, and their health."""

import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from baton.gateway.http.call import REQUEST_ID_HEADER, call_of
from baton.gateway.http.guard import caller_of
from baton.gateway.http.problem import Problem, check_method, check_query, problem_of
from baton.gateway.http.reply import Reply, Whole, json_reply, problem_reply, send_reply
from baton.gateway.page.files import is_public
from baton.router.dispatcher import Dispatcher
from baton.router.model.served_model import ChosenModel
from baton.router.readiness import Readiness
from baton.service.errors import BatonError

_OWNER = "baton"


class Query:
    """An ASGI application that answers a GET."""

    def __init__(self, answer: Callable[[Scope], Awaitable[Reply]], stall_s: float) -> None:
        self._answer = answer
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {REQUEST_ID_HEADER: call_of(Headers(scope=scope), caller_of(scope)).request_id}
        try:
            check_method(scope, "GET", "HEAD")
            if not is_public(scope):  # links to a page may carry anything
                check_query(scope)
            reply = await self._answer(scope)
        except BatonError as error:
            reply = problem_reply(problem_of(error, {}))
        except Problem as problem:
            reply = problem_reply(problem)
        await send_reply(reply, send, headers, self._stall_s)


class Unknown:
    """An ASGI application for paths that there are not."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = Problem(HTTPStatus.NOT_FOUND, f"there is no {scope['path'][:200]}", code="unknown_path")
        await send_reply(problem_reply(problem), send, {}, self._stall_s)


class Operations:
    def __init__(self, dispatcher: Dispatcher, readiness: Readiness, grpc_port: Callable[[], int]) -> None:
        self._dispatcher = dispatcher
        self._readiness = readiness
        self._grpc_port = grpc_port
        self._created = int(time.time())

    async def models(self, scope: Scope) -> Reply:
        """Raises: Unavailable."""
        models = [self._model(chosen) for chosen in await self._dispatcher.models()]
        return json_reply({"object": "list", "data": models})

    async def model(self, scope: Scope) -> Reply:
        """Raises: NotFound, Unavailable."""
        return json_reply(self._model(await self._dispatcher.choose(scope["path_params"]["model"])))

    async def health(self, scope: Scope) -> Reply:
        """The process answers: /ready reports whether it can serve."""
        return Whole(media_type="")

    async def ready(self, scope: Scope) -> Reply:
        detail = self._readiness.detail
        if self._dispatcher.draining:
            return json_reply({"ready": False, "detail": "draining"}, HTTPStatus.SERVICE_UNAVAILABLE)
        status = HTTPStatus.OK if self._readiness.ready else HTTPStatus.SERVICE_UNAVAILABLE
        return json_reply({"ready": self._readiness.ready, "detail": detail}, status)

    async def version(self, scope: Scope) -> Reply:
        return json_reply({"version": installed_version(), "grpc_port": self._grpc_port()})

    def _model(self, chosen: ChosenModel) -> dict[str, object]:
        return {
            "id": chosen.name,
            "object": "model",
            "created": self._created,
            "owned_by": _OWNER,
            "root": chosen.served.name,
            "parent": chosen.served.name if chosen.adapter is not None else None,
            "max_model_len": chosen.served.max_model_len,
        }


def installed_version() -> str:
    """Of the distribution; an image runs the sources as they lie there."""
    try:
        return version("baton-serve")
    except PackageNotFoundError:
        return "0.0.0"
