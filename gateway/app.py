"""All routes, as one ASGI application."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Scope

from baton.gateway.http.call import Call
from baton.gateway.http.endpoint import Endpoint, Transport
from baton.gateway.http.problem import Renamed
from baton.gateway.http.reply import EVENT_STREAM, JSON, Reply, Whole, json_reply
from baton.gateway.messages.chat import ChatRequest
from baton.gateway.messages.completions import CompletionRequest
from baton.gateway.messages.responses import ResponseRequest
from baton.gateway.messages.simple import DetokenizeRequest, GenerateRequest, TokenizeRequest
from baton.gateway.page.files import file_answers
from baton.gateway.page.state import PATH as STATE_PATH
from baton.gateway.page.state import PageState
from baton.gateway.routes.chat import RENAMED as CHAT_NAMES
from baton.gateway.routes.chat import Chat
from baton.gateway.routes.completions import RENAMED as COMPLETION_NAMES
from baton.gateway.routes.completions import Completions
from baton.gateway.routes.openapi import openapi_document
from baton.gateway.routes.operations import Operations, Query, Unknown, installed_version
from baton.gateway.routes.responses import RENAMED as RESPONSE_NAMES
from baton.gateway.routes.responses import Responses
from baton.gateway.routes.simple import GENERATE_NAMES, TOKENIZER_NAMES, Simple
from baton.router.dispatcher import Dispatcher
from baton.router.readiness import Readiness
from baton.router.types.request import Operation

STREAMED = {
    "/v1/completions": EVENT_STREAM,
    "/v1/chat/completions": EVENT_STREAM,
    "/v1/responses": EVENT_STREAM,
    "/generate": "application/octet-stream",
}
"""Routes whose calls are requests, and the media types of their streams."""


def make_app(
    dispatcher: Dispatcher,
    readiness: Readiness,
    metrics: CollectorRegistry,
    page: PageState,
    transport: Transport,
    grpc_port: Callable[[], int],
) -> Router:
    """`metrics` is exposed at /metrics; `grpc_port` is the bound public port, once there is one.

    Raises: OSError where files of the page are missing.
    """
    posts = _posts(dispatcher, transport)
    for path in STREAMED:
        posts[path].observers.append(page.recent.refused)
    document: dict[str, Any] = {}

    async def exposed(scope: Scope) -> Reply:
        return Whole(generate_latest(metrics), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def described(scope: Scope) -> Reply:
        return json_reply(document)

    operations = Operations(dispatcher, readiness, grpc_port)
    gets: dict[str, tuple[str, Callable[[Scope], Awaitable[Reply]]]] = {
        "/v1/models": (JSON, operations.models),
        "/v1/models/{model:path}": (JSON, operations.model),
        "/health": ("", operations.health),
        "/ready": (JSON, operations.ready),
        "/version": (JSON, operations.version),
        "/metrics": (CONTENT_TYPE_PLAIN_0_0_4, exposed),
        "/openapi.json": (JSON, described),
        STATE_PATH: (JSON, page.answer),
    }
    document |= openapi_document(
        {path: endpoint.message_type for path, endpoint in posts.items()},
        {path.replace(":path", ""): media for path, (media, _) in gets.items()},
        STREAMED,
        installed_version(),
    )
    answers = {path: answer for path, (_, answer) in gets.items()} | file_answers()
    applications: dict[str, ASGIApp] = {path: Query(answer, transport.stall_s) for path, answer in answers.items()}
    applications |= posts
    routes = [Route(path, application) for path, application in applications.items()]
    # The bare router: each layer of middleware would wrap the sending of every token.
    return Router(routes, redirect_slashes=False, default=Unknown(transport.stall_s))


def _posts(dispatcher: Dispatcher, transport: Transport) -> dict[str, Endpoint[Any]]:
    simple, generate, chat = Simple(dispatcher), Operation.GENERATE, Operation.CHAT

    def endpoint(
        message: type[Any],
        answer: Callable[[Any, Call], Awaitable[Reply]],
        names: Renamed,
        operation: Operation | None = None,
    ) -> Endpoint[Any]:
        refuse = None if operation is None else partial(dispatcher.accounts.refuse, operation)
        return Endpoint(message, answer, transport, names, refuse)

    return {
        "/v1/completions": endpoint(CompletionRequest, Completions(dispatcher).answer, COMPLETION_NAMES, generate),
        "/v1/chat/completions": endpoint(ChatRequest, Chat(dispatcher).answer, CHAT_NAMES, chat),
        "/v1/responses": endpoint(ResponseRequest, Responses(dispatcher).answer, RESPONSE_NAMES, chat),
        "/generate": endpoint(GenerateRequest, simple.generate, GENERATE_NAMES, generate),
        "/tokenize": endpoint(TokenizeRequest, simple.tokenize, TOKENIZER_NAMES),
        "/detokenize": endpoint(DetokenizeRequest, simple.detokenize, TOKENIZER_NAMES),
    }
