"""All routes, as one ASGI application, and the OpenAPI document that is made from their messages."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.datastructures import Headers
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Scope

from baton.gateway.answers import created_now
from baton.gateway.anthropic.bodies import CountTokensRequest, MessagesRequest
from baton.gateway.http.endpoint import Endpoint, Query, Transport, Unknown
from baton.gateway.http.exchange import EVENT_STREAM, JSON, Reply, Whole, json_reply
from baton.gateway.http.problem import Dialect, Renamed
from baton.gateway.messages import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    ResponseRequest,
    TokenizeRequest,
)
from baton.gateway.metrics import METRIC_FORMATS, exposition
from baton.gateway.page.files import file_answers
from baton.gateway.page.state import PATH as STATE_PATH
from baton.gateway.page.state import PageState
from baton.gateway.requests import Call
from baton.gateway.routes.chat import RENAMED as CHAT_NAMES
from baton.gateway.routes.chat import answer_chat
from baton.gateway.routes.completions import RENAMED as COMPLETION_NAMES
from baton.gateway.routes.completions import answer_completion
from baton.gateway.routes.messages import RENAMED as ANTHROPIC_NAMES
from baton.gateway.routes.messages import answer_messages, count_tokens
from baton.gateway.routes.responses import RENAMED as RESPONSE_NAMES
from baton.gateway.routes.responses import answer_response
from baton.gateway.routes.simple import GENERATE_NAMES, TOKENIZER_NAMES, detokenize, generate, tokenize
from baton.router.dispatcher import Dispatcher
from baton.router.model.served_model import ChosenModel
from baton.router.readiness import Readiness
from baton.router.types.request import Operation
from baton.versions import OWN

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_FAILURES = {
    "400": "the request must be changed; `param` names the field",
    "404": "no such model",
    "408": "the body did not come in",
    "413": "the body is too large",
    "429": "no room; come back after Retry-After",
    "500": "our fault",
    "503": "not ready, or draining",
    "504": "the deadline passed",
}
_GET_FAILURES = {"400": "there are no query parameters; `param` names the first", "503": _FAILURES["503"]}
_PATH_MODEL = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def openapi_document(
    posts: Mapping[str, type[BaseModel]], gets: Mapping[str, Sequence[str]], streamed: Mapping[str, str], version: str
) -> dict[str, Any]:
    """`posts` are messages by path, `gets` media types by path (none for no content), `streamed` media types of
    streams by path.
    """
    _, schemas = models_json_schema(
        [(message, "validation") for message in posts.values()], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Any] = {path: {"get": _get(path, media)} for path, media in gets.items()}
    for path, message in posts.items():
        paths[path] = {"post": _post(path, message.__name__, [streamed[path]] if path in streamed else [])}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version},
        "paths": paths,
        "components": {"schemas": {**schemas.get("$defs", {}), "Error": _ERROR}},
    }


def _post(path: str, message: str, streams: Sequence[str]) -> dict[str, Any]:
    body = {"required": True, "content": {"application/json": {"schema": _reference(message)}}}
    content = {"application/json": {"schema": {"type": "object"}}}
    content |= {media.partition(";")[0]: {} for media in streams}
    responses = {"200": {"description": "the answer", "content": content}, **_failures(_FAILURES)}
    return {"operationId": _operation_id("post", path), "requestBody": body, "responses": responses}


def _get(path: str, media: Sequence[str]) -> dict[str, Any]:
    content: dict[str, Any] = {"content": {each.partition(";")[0]: {"schema": {}} for each in media}} if media else {}
    responses = {"200": {"description": "as it is now", **content}, **_failures(_GET_FAILURES)}
    operation: dict[str, Any] = {"operationId": _operation_id("get", path), "responses": responses}
    if "{" in path:
        operation["parameters"] = [_PATH_MODEL]
        responses |= _failures({"404": _FAILURES["404"]})
    return operation


def _failures(descriptions: Mapping[str, str]) -> dict[str, Any]:
    content = {"application/json": {"schema": _reference("Error")}}
    return {status: {"description": description, "content": content} for status, description in descriptions.items()}


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _operation_id(method: str, path: str) -> str:
    return method + path.replace("/", "_").replace("{", "").replace("}", "").replace(":path", "")


_OWNER = "baton"


class Operations:
    def __init__(
        self, dispatcher: Dispatcher, readiness: Readiness, grpc_port: Callable[[], int], is_guarded: bool
    ) -> None:
        self._dispatcher = dispatcher
        self._readiness = readiness
        self._is_guarded = is_guarded
        self._grpc_port = grpc_port
        self._created = created_now()

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
        """Load balancers and probes have no key; where others need one, they learn no more than the yes or no."""
        detail = "" if self._is_guarded else self._readiness.detail
        if self._dispatcher.draining:
            return json_reply({"ready": False, "detail": "draining"}, HTTPStatus.SERVICE_UNAVAILABLE)
        status = HTTPStatus.OK if self._readiness.ready else HTTPStatus.SERVICE_UNAVAILABLE
        return json_reply({"ready": self._readiness.ready, "detail": detail}, status)

    async def version(self, scope: Scope) -> Reply:
        versions = {"version": OWN.release, "protocol": OWN.protocol, "oldest_protocol": OWN.oldest_protocol}
        return json_reply({**versions, "grpc_port": self._grpc_port()})

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


STREAMED = {
    "/v1/completions": EVENT_STREAM,
    "/v1/chat/completions": EVENT_STREAM,
    "/v1/messages": EVENT_STREAM,
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
        posts[path].observers.append(page.recent.refused_soon)
    document: dict[str, Any] = {}

    async def exposed(scope: Scope) -> Reply:
        text = exposition(metrics, Headers(scope=scope).get("accept", ""))
        return Whole(text.body, media_type=text.media_type)

    async def described(scope: Scope) -> Reply:
        return json_reply(document)

    operations = Operations(dispatcher, readiness, grpc_port, page.access.is_guarded)
    gets: dict[str, tuple[Sequence[str], Callable[[Scope], Awaitable[Reply]]]] = {
        "/v1/models": ([JSON], operations.models),
        "/v1/models/{model:path}": ([JSON], operations.model),
        "/health": ([], operations.health),
        "/ready": ([JSON], operations.ready),
        "/version": ([JSON], operations.version),
        "/metrics": (METRIC_FORMATS, exposed),
        "/openapi.json": ([JSON], described),
        STATE_PATH: ([JSON], page.answer),
    }
    document |= openapi_document(
        {path: endpoint.message_type for path, endpoint in posts.items()},
        {path.replace(":path", ""): media for path, (media, _) in gets.items()},
        STREAMED,
        OWN.release,
    )
    answers = {path: answer for path, (_, answer) in gets.items()} | file_answers()
    applications: dict[str, ASGIApp] = {path: Query(answer, transport.stall_s) for path, answer in answers.items()}
    applications |= posts
    routes = [Route(path, application) for path, application in applications.items()]
    # The bare router: each layer of middleware would wrap the sending of every token.
    return Router(routes, redirect_slashes=False, default=Unknown(transport.stall_s))


def _posts(dispatcher: Dispatcher, transport: Transport) -> dict[str, Endpoint[Any]]:
    def endpoint(
        message: type[Any],
        answer: Callable[[Dispatcher, Any, Call], Awaitable[Reply]],
        names: Renamed,
        operation: Operation | None = None,
        dialect: Dialect = Dialect.OPENAI,
    ) -> Endpoint[Any]:
        refuse = None if operation is None else partial(dispatcher.accounts.refuse, operation)
        return Endpoint(message, partial(answer, dispatcher), transport, names, refuse, dialect)

    anthropic = Dialect.ANTHROPIC

    return {
        "/v1/completions": endpoint(CompletionRequest, answer_completion, COMPLETION_NAMES, Operation.GENERATE),
        "/v1/chat/completions": endpoint(ChatRequest, answer_chat, CHAT_NAMES, Operation.CHAT),
        "/v1/messages": endpoint(MessagesRequest, answer_messages, ANTHROPIC_NAMES, Operation.CHAT, anthropic),
        "/v1/messages/count_tokens": endpoint(CountTokensRequest, count_tokens, ANTHROPIC_NAMES, dialect=anthropic),
        "/v1/responses": endpoint(ResponseRequest, answer_response, RESPONSE_NAMES, Operation.CHAT),
        "/generate": endpoint(GenerateRequest, generate, GENERATE_NAMES, Operation.GENERATE),
        "/tokenize": endpoint(TokenizeRequest, tokenize, TOKENIZER_NAMES),
        "/detokenize": endpoint(DetokenizeRequest, detokenize, TOKENIZER_NAMES),
    }
