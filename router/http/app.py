"""ASGI application of the router's HTTP server, with all routes."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.datastructures import Headers
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Scope

from baton.router.dispatcher import Dispatcher
from baton.router.http.answers import created_now, rfc3339_now
from baton.router.http.anthropic.bodies import CountTokensRequest, MessagesRequest
from baton.router.http.batches.bodies import CreateBatch, FileForm
from baton.router.http.edge.document import openapi_document
from baton.router.http.edge.endpoint import Endpoint, HttpTransport, PostOr, QueryEndpoint, UnknownPath
from baton.router.http.edge.exchange import EVENT_STREAM, JSON, FullReply, Reply, json_reply
from baton.router.http.messages import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from baton.router.http.metrics import METRIC_FORMATS, exposition
from baton.router.http.ollama.answer import JSON_LINES
from baton.router.http.ollama.bodies import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from baton.router.http.ollama.models import listed, running
from baton.router.http.page.files import file_answers
from baton.router.http.page.state import PATH as STATE_PATH
from baton.router.http.page.state import PageState
from baton.router.http.requests import HttpCall
from baton.router.http.responses.bodies import CompactRequest, ResponseRequest
from baton.router.http.responses.store import ResponseStore
from baton.router.http.routes import ollama
from baton.router.http.routes.adapters import load_adapter, unload_adapter
from baton.router.http.routes.batches import BATCHES_QUERY, CONTENT, FILES_QUERY, BatchRoutes
from baton.router.http.routes.chat import answer_chat
from baton.router.http.routes.completions import answer_completion
from baton.router.http.routes.messages import answer_messages, count_tokens
from baton.router.http.routes.responses import LIST_PARAMETERS, ResponseRoutes
from baton.router.http.routes.simple import detokenize, generate, tokenize
from baton.router.http.vectors.answer import answer_embeddings, answer_rerank, answer_score
from baton.router.http.vectors.bodies import EmbeddingRequest, RerankRequest, ScoreRequest
from baton.router.model.served_model import ChosenModel
from baton.router.readiness import Readiness
from baton.router.types.request import Operation
from baton.versions import OWN

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
        self._served_since = rfc3339_now()

    async def models(self, scope: Scope) -> Reply:
        """List the model and its adapters. Raises: Unavailable."""
        models = [self._model(chosen) for chosen in await self._dispatcher.models()]
        return json_reply({"object": "list", "data": models})

    async def model(self, scope: Scope) -> Reply:
        """Describe the model or adapter named in the path. Raises: NotFound, Unavailable."""
        return json_reply(self._model(await self._dispatcher.choose(scope["path_params"]["model"])))

    async def health(self, scope: Scope) -> Reply:
        """Answer 200 as long as the process runs. Whether it can serve is reported by /ready."""
        return FullReply(media_type="")

    async def ready(self, scope: Scope) -> Reply:
        """Report whether the router can serve. Details are left out if API keys are configured: callers need no key."""
        detail = "" if self._is_guarded else self._readiness.detail
        if self._dispatcher.draining:
            return json_reply({"ready": False, "detail": "draining"}, HTTPStatus.SERVICE_UNAVAILABLE)
        status = HTTPStatus.OK if self._readiness.ready else HTTPStatus.SERVICE_UNAVAILABLE
        return json_reply({"ready": self._readiness.ready, "detail": detail}, status)

    async def version(self, scope: Scope) -> Reply:
        versions = {"version": OWN.release, "protocol": OWN.protocol, "oldest_protocol": OWN.oldest_protocol}
        return json_reply({**versions, "grpc_port": self._grpc_port()})

    async def ollama_version(self, scope: Scope) -> Reply:
        return json_reply({"version": OWN.release})

    async def ollama_models(self, scope: Scope) -> Reply:
        """List the models for Ollama's clients. Raises: Unavailable."""
        models = await self._dispatcher.models()
        return json_reply({"models": [listed(chosen, self._served_since) for chosen in models]})

    async def ollama_running(self, scope: Scope) -> Reply:
        """List the loaded models for Ollama's clients. Raises: Unavailable."""
        return json_reply({"models": [running(chosen) for chosen in await self._dispatcher.models()]})

    def _model(self, chosen: ChosenModel) -> dict[str, object]:
        return {
            "id": chosen.name,
            "object": "model",
            "created": self._created,
            "owned_by": _OWNER,
            "root": chosen.served.name,
            "parent": chosen.served.name if chosen.lora is not None else None,
            "system_fingerprint": chosen.version,
            "max_model_len": chosen.served.max_model_len,
        }


MODELS_QUERY = ("client_version",)
"""Query parameter that Codex adds to the list of models. It is ignored."""
_RESPONSE = "/v1/responses/{response_id:path}"
"""Path of a response: its id may contain any character that a request id may."""
_ITEMS = f"{_RESPONSE}/input_items"
_COMPACT = "/v1/responses/compact"
_FILES, _FILE, _CONTENT = "/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content"
_BATCHES, _BATCH, _CANCEL = "/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel"

Gets = dict[str, tuple[Sequence[str], Callable[[Scope], Awaitable[Reply]]]]
"""Routes with GET, by path: media types and handler."""

STREAMED = {
    "/v1/completions": EVENT_STREAM,
    "/v1/chat/completions": EVENT_STREAM,
    "/v1/messages": EVENT_STREAM,
    "/v1/responses": EVENT_STREAM,
    "/api/chat": JSON_LINES,
    "/api/generate": JSON_LINES,
    "/generate": "application/octet-stream",
}
"""Routes that can stream, with the media types of their streams."""
REQUESTS = (*STREAMED, _COMPACT, "/v1/embeddings", "/v1/score", "/v1/rerank", "/rerank", "/api/embed")
"""Routes whose calls count as requests."""


def make_app(
    dispatcher: Dispatcher,
    readiness: Readiness,
    metrics: CollectorRegistry,
    page: PageState,
    transport: HttpTransport,
    grpc_port: Callable[[], int],
    store: ResponseStore,
    with_adapters: bool = False,
    batches: BatchRoutes | None = None,
) -> Router:
    """Create the application. `grpc_port` returns the bound public gRPC port.

    `with_adapters`: serve the routes that load and unload adapters. `batches`: routes of files and batches.
    Raises: OSError if files of the page are missing.
    """
    responses = ResponseRoutes(store)
    posts = _posts(dispatcher, transport, responses, page, with_adapters)
    document: dict[str, Any] = {}

    async def exposed(scope: Scope) -> Reply:
        text = exposition(metrics, Headers(scope=scope).get("accept", ""))
        return FullReply(text.body, media_type=text.media_type)

    async def described(scope: Scope) -> Reply:
        return json_reply(document)

    operations = Operations(dispatcher, readiness, grpc_port, page.access.is_guarded)
    gets: Gets = {
        "/v1/models": ([JSON], operations.models),
        "/v1/models/{model:path}": ([JSON], operations.model),
        "/api/tags": ([JSON], operations.ollama_models),
        "/api/ps": ([JSON], operations.ollama_running),
        "/api/version": ([JSON], operations.ollama_version),
        _ITEMS: ([JSON], responses.input_items),
        _RESPONSE: ([JSON], responses.one),
        "/health": ([], operations.health),
        "/ready": ([JSON], operations.ready),
        "/version": ([JSON], operations.version),
        "/metrics": (METRIC_FORMATS, exposed),
        "/openapi.json": ([JSON], described),
        STATE_PATH: ([JSON], page.answer),
        **(_batch_gets(batches) if batches is not None else {}),
    }
    document |= _document(posts, gets, batches is not None)
    answers = {path: answer for path, (_, answer) in gets.items()} | file_answers()
    applications: dict[str, ASGIApp] = {
        _COMPACT: posts[_COMPACT],  # before the path of a response, which it would match
        **{path: QueryEndpoint(answer) for path, answer in answers.items()},
    }
    applications["/v1/models"] = QueryEndpoint(operations.models, MODELS_QUERY)
    applications[_ITEMS] = QueryEndpoint(responses.input_items, LIST_PARAMETERS)
    applications[_RESPONSE] = QueryEndpoint(responses.one, methods=("GET", "HEAD", "DELETE"))
    applications |= posts
    if batches is not None:
        applications |= _batch_applications(batches, dispatcher, transport)
    routes = [Route(path, application) for path, application in applications.items()]
    # Without middleware, since each layer would add to the cost of sending every token.
    return Router(routes, redirect_slashes=False, default=UnknownPath({**ollama.UNSERVED, **_TURNED_OFF}))


_TURNED_OFF = {
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), "--http-adapters of the router turns it on"),
    **dict.fromkeys((_FILES, _BATCHES), "--batch-dir of the router turns it on"),
}


def _document(posts: Mapping[str, Endpoint[Any]], gets: Gets, has_batches: bool) -> dict[str, Any]:
    return openapi_document(
        {path: endpoint.message_type for path, endpoint in posts.items()}
        | ({_FILES: FileForm, _BATCHES: CreateBatch} if has_batches else {}),
        {path.replace(":path", ""): media for path, (media, _) in gets.items()},
        STREAMED,
        OWN.release,
        {_ITEMS.replace(":path", ""): LIST_PARAMETERS, _FILES: FILES_QUERY, _BATCHES: BATCHES_QUERY},
        [_RESPONSE.replace(":path", ""), *([_FILE] if has_batches else [])],
        [_CANCEL] if has_batches else [],
    )


def _batch_gets(batches: BatchRoutes) -> Gets:
    return {
        _FILES: ([JSON], batches.files),
        _FILE: ([JSON], batches.file),
        _CONTENT: ([CONTENT], batches.content),
        _BATCHES: ([JSON], batches.batches),
        _BATCH: ([JSON], batches.batch),
    }


def _batch_applications(batches: BatchRoutes, dispatcher: Dispatcher, transport: HttpTransport) -> dict[str, ASGIApp]:
    """Return the applications of paths under /v1/files and /v1/batches that serve more than a GET."""
    reads = ("GET", "HEAD")
    files = QueryEndpoint(batches.files, FILES_QUERY, (*reads, "POST"))
    listed = QueryEndpoint(batches.batches, BATCHES_QUERY, (*reads, "POST"))
    created = Endpoint(CreateBatch, partial(batches.create, dispatcher), transport)
    return {
        _FILES: PostOr(batches.upload_endpoint(transport), files),
        _FILE: QueryEndpoint(batches.file, methods=(*reads, "DELETE")),
        _BATCHES: PostOr(created, listed),
        _CANCEL: QueryEndpoint(batches.cancel, methods=("POST",)),
    }


def _posts(
    dispatcher: Dispatcher, transport: HttpTransport, responses: ResponseRoutes, page: PageState, with_adapters: bool
) -> dict[str, Endpoint[Any]]:
    def endpoint(
        message: type[Any],
        answer: Callable[[Dispatcher, Any, HttpCall], Awaitable[Reply]],
        operation: Operation | None = None,
    ) -> Endpoint[Any]:
        if operation is None:
            return Endpoint(message, partial(answer, dispatcher), transport)
        refuse = partial(dispatcher.accounts.refuse, operation)
        return Endpoint(message, partial(answer, dispatcher), transport, refuse, page.recent.refused_soon)

    adapters: dict[str, Endpoint[Any]] = {}
    if with_adapters:
        adapters["/v1/load_lora_adapter"] = endpoint(LoadAdapterRequest, load_adapter)
        adapters["/v1/unload_lora_adapter"] = endpoint(UnloadAdapterRequest, unload_adapter)

    return {
        "/v1/completions": endpoint(CompletionRequest, answer_completion, Operation.GENERATE),
        "/v1/chat/completions": endpoint(ChatRequest, answer_chat, Operation.CHAT),
        "/v1/messages": endpoint(MessagesRequest, answer_messages, Operation.CHAT),
        "/v1/messages/count_tokens": endpoint(CountTokensRequest, count_tokens),
        "/v1/responses": endpoint(ResponseRequest, responses.create, Operation.CHAT),
        _COMPACT: endpoint(CompactRequest, responses.compact, Operation.CHAT),
        "/api/chat": endpoint(OllamaChatRequest, ollama.answer, Operation.CHAT),
        "/api/generate": endpoint(OllamaGenerateRequest, ollama.answer, Operation.GENERATE),
        "/api/embed": endpoint(OllamaEmbedRequest, ollama.embed, Operation.EMBED),
        "/api/show": endpoint(OllamaShowRequest, ollama.show),
        "/generate": endpoint(GenerateRequest, generate, Operation.GENERATE),
        "/v1/embeddings": endpoint(EmbeddingRequest, answer_embeddings, Operation.EMBED),
        "/v1/score": endpoint(ScoreRequest, answer_score, Operation.EMBED),
        "/v1/rerank": endpoint(RerankRequest, answer_rerank, Operation.EMBED),
        "/rerank": endpoint(RerankRequest, answer_rerank, Operation.EMBED),
        "/tokenize": endpoint(TokenizeRequest, tokenize),
        "/detokenize": endpoint(DetokenizeRequest, detokenize),
        **adapters,
    }
